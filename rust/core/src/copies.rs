//! Block copies (copy-on-write): the queue of those that single calls asked for, until the caller or a step takes it,
//! and those that open steps have handed out (*lent*), until the step is committed or cancelled.
//!
//! A copy holds its source; its target needs no hold. When the target is freed, a queued copy is withdrawn, and a lent
//! one is known to have come to nothing. There are usually none, so ordered maps serve: their cost is O(log n) in
//! copies and independent of hash order (I11).

use std::collections::BTreeMap;

use crate::ids::BlockId;

/// Queued copies.
#[derive(Debug, Default)]
pub struct Copies {
    /// Ticket -> (source, target), in the order of asking.
    queue: BTreeMap<u64, (BlockId, BlockId)>,
    /// Target -> ticket, of queued and lent copies whose target was not freed since.
    targets: BTreeMap<BlockId, u64>,
    /// Source -> queued and lent copies that read it.
    sources: BTreeMap<BlockId, u32>,
    next_ticket: u64,
}

impl Copies {
    /// Is no copy queued?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Is a block the target of a copy? (Usually none is.)
    #[must_use]
    pub fn has_targets(&self) -> bool {
        !self.targets.is_empty()
    }

    /// Is this block the target of a copy that may not have been carried out yet?
    #[must_use]
    pub fn is_target(&self, block: BlockId) -> bool {
        self.targets.contains_key(&block)
    }

    /// Queued copies.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Where a copy of `block` must read from: `block`, or the source of the queued copy that is still to fill it.
    #[must_use]
    pub fn origin(&self, block: BlockId) -> BlockId {
        let copy = self.targets.get(&block).and_then(|ticket| self.queue.get(ticket));
        copy.map_or(block, |&(source, _)| source)
    }

    /// Copies that read a block.
    #[must_use]
    pub fn readers(&self, block: BlockId) -> u32 {
        self.sources.get(&block).copied().unwrap_or(0)
    }

    /// Queues a copy; answers its ticket. The caller holds the source for it.
    pub fn push(&mut self, source: BlockId, target: BlockId) -> u64 {
        debug_assert!(!self.targets.contains_key(&target) && self.origin(source) == source);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.queue.insert(ticket, (source, target));
        self.targets.insert(target, ticket);
        *self.sources.entry(source).or_insert(0) += 1;
        ticket
    }

    /// Takes the oldest copy out of the queue for an open step: ticket, source, target.
    pub fn lend(&mut self) -> Option<(u64, BlockId, BlockId)> {
        let (ticket, (source, target)) = self.queue.pop_first()?;
        Some((ticket, source, target))
    }

    /// Is the target of a lent copy still what it was then?
    #[must_use]
    pub fn is_current(&self, target: BlockId, ticket: u64) -> bool {
        self.targets.get(&target) == Some(&ticket)
    }

    /// A lent copy is carried out, or comes to nothing. The caller lets go of its source.
    pub fn end_loan(&mut self, ticket: u64, source: BlockId, target: BlockId) {
        if self.is_current(target, ticket) {
            self.targets.remove(&target);
        }
        self.forget_reader(source);
    }

    /// A lent copy is to be handed out again, before all that were asked for later.
    pub fn take_back(&mut self, ticket: u64, source: BlockId, target: BlockId) {
        debug_assert!(self.is_current(target, ticket));
        self.queue.insert(ticket, (source, target));
    }

    /// Queued copies that read `from` read `to`; answers how many those are.
    pub fn reroute(&mut self, from: BlockId, to: BlockId) -> u32 {
        if self.readers(from) == 0 {
            return 0;
        }
        let mut count = 0;
        for (source, _) in self.queue.values_mut().filter(|(source, _)| *source == from) {
            *source = to;
            count += 1;
        }
        for _ in 0..count {
            self.forget_reader(from);
        }
        if count > 0 {
            *self.sources.entry(to).or_insert(0) += count;
        }
        count
    }

    /// Withdraws the copy into `target`, if there is one; answers its source, which the caller lets go of.
    /// A lent one keeps its source until its step ends.
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
