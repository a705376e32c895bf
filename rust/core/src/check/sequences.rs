//! What sequences say of themselves, and what they and the queued copies hold.

use super::Checker;
use crate::batch::Batch;
use crate::blocks::State as BlockState;
use crate::ids::{BlockId, NodeId};
use crate::sequence::{Sequence, State};

impl Checker<'_> {
    pub(super) fn check_sequences(&mut self) {
        let pager = self.pager;
        let (mut running, mut pinned, mut preempted) = (0, 0, 0);
        for sequence in pager.sequences.iter() {
            match sequence.state {
                State::Running => {
                    running += 1;
                    pinned += usize::from(sequence.pinned);
                    self.check_running(sequence);
                }
                State::Preempted => {
                    preempted += 1;
                    let is_bare =
                        sequence.table.is_empty() && sequence.path_blocks == 0 && sequence.end == sequence.root;
                    self.expect(is_bare && sequence.num_committed == 0, || {
                        format!("I2: preempted sequence {} holds blocks", sequence.serial)
                    });
                }
            }
            self.check_positions(sequence);
        }
        let counted = (pager.num_running, pager.num_running_pinned, pager.num_preempted);
        self.expect(counted == (running, pinned, preempted), || {
            format!("I1: sequences are counted {counted:?} and are {:?}", (running, pinned, preempted))
        });
    }

    fn check_positions(&mut self, sequence: &Sequence) {
        let block_size = self.pager.config().block_size;
        let Sequence { serial, num_cached, num_committed, len, path_blocks, .. } = *sequence;
        self.expect(num_cached <= num_committed && num_committed <= len, || {
            format!(
                "I4: sequence {serial}: cached {num_cached} <= committed {num_committed} <= len {len} does not hold"
            )
        });
        self.expect(path_blocks * block_size <= num_committed || sequence.state == State::Preempted, || {
            format!("I4: sequence {serial} has published {path_blocks} blocks and committed {num_committed} tokens")
        });
        self.expect(path_blocks * block_size + sequence.tail.len() == len, || {
            format!(
                "I2: sequence {serial} has {len} tokens, {path_blocks} blocks of them published, and {} in its tail",
                sequence.tail.len()
            )
        });
    }

    fn check_running(&mut self, sequence: &Sequence) {
        let (pager, block_size) = (self.pager, self.pager.config().block_size);
        let serial = sequence.serial;
        let planned = pager.num_planned(sequence);
        let blocks = planned.max(1).div_ceil(block_size);
        self.expect(sequence.table.len() >= blocks, || {
            format!("I2: sequence {serial} needs {blocks} blocks and its table has {}", sequence.table.len())
        });
        self.expect(sequence.num_committed <= planned && planned <= sequence.len, || {
            format!(
                "I4: sequence {serial}: committed {} <= planned {planned} <= len {} does not hold",
                sequence.num_committed, sequence.len
            )
        });
        let known = pager.num_known(sequence);
        self.expect(known >= sequence.num_committed, || {
            format!("I4: sequence {serial} has committed position {known}, whose token is not known")
        });

        let mut path: Vec<BlockId> = Vec::new();
        let mut node = sequence.end;
        while !node.is_root() {
            path.extend(pager.index[node].run.blocks(block_size).iter().rev());
            node = pager.index[node].parent;
        }
        path.reverse();
        self.expect(node == sequence.root, || format!("I3: sequence {serial} is in another namespace than its path"));
        if path.len() != sequence.path_blocks || path.len() > sequence.table.len() {
            self.violations.push(format!(
                "I6: sequence {serial}'s path has {} blocks, not {}",
                path.len(),
                sequence.path_blocks
            ));
            return;
        }
        if !sequence.end.is_root() {
            *self.pins.entry(sequence.end).or_insert(0) += 1;
        }
        let first_duplicate =
            (0..path.len()).find(|&at| path[at] != sequence.table[at]).unwrap_or(Sequence::NO_DUPLICATE);
        self.expect(first_duplicate == sequence.first_duplicate, || {
            format!("I2: sequence {serial}'s first duplicate is {first_duplicate}, not {}", sequence.first_duplicate)
        });
        for (position, &block) in sequence.table.iter().enumerate() {
            if path.get(position) != Some(&block) {
                self.count_hold(block, &format!("sequence {serial}"));
            }
        }
        let mut sorted = sequence.table.clone();
        sorted.sort_unstable();
        sorted.dedup();
        self.expect(sorted.len() == sequence.table.len(), || format!("I2: sequence {serial} has a block twice"));
    }

    /// Somebody holds a block that no path of his leads to.
    fn count_hold(&mut self, block: BlockId, holder: &str) {
        match self.pager.blocks.state(block) {
            BlockState::Private(_) => *self.private.entry(block).or_insert(0) += 1,
            BlockState::Indexed => *self.extra.entry(block).or_insert(0) += 1,
            BlockState::Free => self.violations.push(format!("I2: {holder} holds free block {block}")),
        }
    }

    pub(super) fn check_copies(&mut self) {
        let lent = self.pager.batches.iter().flat_map(Batch::lent_copies);
        for copy in lent {
            self.count_hold(copy.source, &format!("the lent copy into {}", copy.target));
        }
        let copies: Vec<_> = self.pager.copies.iter().collect();
        for &(source, target) in &copies {
            self.count_hold(source, &format!("the copy into {target}"));
            let is_both = copies.iter().any(|&(_, other)| other == source);
            self.expect(!is_both, || format!("I9: block {source} is source and target of queued copies"));
            self.expect(self.pager.blocks.state(target) != BlockState::Free, || {
                format!("I9: a copy into free block {target} is queued")
            });
        }
    }

    /// I2: counted holders are the holders there are.
    pub(super) fn check_holds(&mut self) {
        let pager = self.pager;
        for block in 0..pager.config().num_blocks as BlockId {
            let expected = self.private.get(&block).copied().unwrap_or(0);
            if let BlockState::Private(holders) = pager.blocks.state(block) {
                self.expect(holders == expected, || {
                    format!("I2: private block {block} counts {holders} holders and has {expected}")
                });
            }
        }
        for (&block, extra) in &pager.extra_holds {
            let expected = self.extra.remove(&block).unwrap_or(0);
            self.expect(extra.holds == expected, || {
                format!("I2: indexed block {block} counts {} holds beside paths and has {expected}", extra.holds)
            });
            let node = &pager.index[extra.node];
            let is_last = node.run.blocks(pager.config().block_size).last() == Some(&block);
            self.expect(is_last, || format!("I2: block {block} is held but not the last of {:?}", extra.node));
            *self.pins.entry(extra.node).or_insert(0) += extra.holds;
        }
        for block in std::mem::take(&mut self.extra).into_keys() {
            self.violations.push(format!("I2: indexed block {block} is held beside paths and nobody counts it"));
        }
        let nodes: Vec<NodeId> = pager.index.nodes().map(|(id, _)| id).collect();
        for id in nodes {
            let node = &pager.index[id];
            let expected = self.pins.get(&id).copied().unwrap_or(0);
            self.expect(node.pins == expected, || format!("I2: {id:?} counts {} pins and has {expected}", node.pins));
            let held = pager.index.nodes().filter(|(_, child)| child.parent == id && child.is_held()).count();
            self.expect(node.held_children as usize == held, || {
                format!("I2: {id:?} counts {} held children and has {held}", node.held_children)
            });
        }
    }
}
