//! The queue of block copies that single calls asked for (copy-on-write), until the caller takes it.
//!
//! A copy holds its source; its target needs no hold, and when the target is freed the copy is withdrawn. The queue
//! is usually empty, so ordered maps serve: their cost is O(log n) in queued copies and independent of hash order
//! (I11).

use std::collections::BTreeMap;

use crate::ids::BlockId;

/// Queued copies.
#[derive(Debug, Default)]
pub struct Copies {
    /// Ticket -> (source, target), in the order of asking.
    queue: BTreeMap<u64, (BlockId, BlockId)>,
    /// Target -> ticket.
    targets: BTreeMap<BlockId, u64>,
    /// Source -> copies that read it.
    sources: BTreeMap<BlockId, u32>,
    next_ticket: u64,
}

impl Copies {
    /// Is there none? (The usual case.)
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Queued copies.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Where a copy of `block` must read from: `block`, or the source of the copy that is still to fill it.
    #[must_use]
    pub fn origin(&self, block: BlockId) -> BlockId {
        self.targets.get(&block).map_or(block, |ticket| self.queue[ticket].0)
    }

    /// Queued copies that read a block.
    #[must_use]
    pub fn readers(&self, block: BlockId) -> u32 {
        self.sources.get(&block).copied().unwrap_or(0)
    }

    /// Queues a copy. The caller holds the source for it.
    pub fn push(&mut self, source: BlockId, target: BlockId) {
        debug_assert!(!self.targets.contains_key(&source) && !self.targets.contains_key(&target));
        self.queue.insert(self.next_ticket, (source, target));
        self.targets.insert(target, self.next_ticket);
        *self.sources.entry(source).or_insert(0) += 1;
        self.next_ticket += 1;
    }

    /// Withdraws the copy into `target`, if there is one; answers its source, which the caller lets go of.
    pub fn withdraw(&mut self, target: BlockId) -> Option<BlockId> {
        let ticket = self.targets.remove(&target)?;
        let (source, _) = self.queue.remove(&ticket)?;
        self.forget_reader(source);
        Some(source)
    }

    /// Takes the oldest copy out.
    pub fn pop(&mut self) -> Option<(BlockId, BlockId)> {
        let (_, (source, target)) = self.queue.pop_first()?;
        self.targets.remove(&target);
        self.forget_reader(source);
        Some((source, target))
    }

    fn forget_reader(&mut self, source: BlockId) {
        if let Some(readers) = self.sources.get_mut(&source) {
            *readers -= 1;
            if *readers == 0 {
                self.sources.remove(&source);
            }
        }
    }

    /// The queue, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (BlockId, BlockId)> {
        self.queue.values().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_come_out_in_the_order_of_asking() {
        let mut copies = Copies::default();
        for (source, target) in [(9, 1), (3, 8), (9, 2)] {
            copies.push(source, target);
        }
        assert_eq!(copies.iter().collect::<Vec<_>>(), [(9, 1), (3, 8), (9, 2)]);
        assert_eq!((copies.len(), copies.readers(9), copies.readers(3), copies.readers(8)), (3, 2, 1, 0));
        assert_eq!(
            [copies.pop(), copies.pop(), copies.pop(), copies.pop()],
            [Some((9, 1)), Some((3, 8)), Some((9, 2)), None]
        );
        assert!(copies.is_empty() && copies.readers(9) == 0);
    }

    #[test]
    fn a_withdrawn_copy_answers_its_source_once() {
        let mut copies = Copies::default();
        copies.push(9, 1);
        copies.push(9, 2);
        assert_eq!([copies.withdraw(1), copies.withdraw(1), copies.withdraw(9)], [Some(9), None, None]);
        assert_eq!((copies.readers(9), copies.origin(1), copies.pop()), (1, 1, Some((9, 2))));
    }

    #[test]
    fn a_copy_of_a_pending_target_starts_at_its_source() {
        let mut copies = Copies::default();
        copies.push(9, 1);
        assert_eq!([copies.origin(1), copies.origin(9), copies.origin(5)], [9, 9, 5]);
    }

    #[test]
    fn a_target_can_be_one_again() {
        let mut copies = Copies::default();
        copies.push(9, 1);
        copies.pop();
        copies.push(7, 1);
        copies.withdraw(1);
        copies.push(5, 1);
        assert_eq!((copies.origin(1), copies.len(), copies.readers(7)), (5, 1, 0));
    }
}
