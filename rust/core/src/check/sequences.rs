//! What sequences say of themselves, and what they and the queued copies hold.

use std::fmt;

use super::Checker;
use crate::batch::Batch;
use crate::blocks::State as BlockState;
use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::{self, with_capacity, zeroed};
use crate::sequence::{Sequence, State};

impl Checker<'_> {
    pub(super) fn check_sequences(&mut self) -> Result<()> {
        let pager = self.pager;
        let (mut running, mut pinned, mut preempted, mut swapped) = (0, 0, 0, 0);
        for sequence in pager.sequences.iter() {
            running += usize::from(sequence.state.is_on_device());
            pinned += usize::from(sequence.state.is_on_device() && sequence.pinned);
            match sequence.state {
                State::Running | State::Fetching | State::SwappingOut => self.check_running(sequence)?,
                State::SwappingIn => self.check_swapping_in(sequence)?,
                State::Preempted | State::Swapped => {
                    let is_preempted = sequence.state == State::Preempted;
                    preempted += usize::from(is_preempted);
                    swapped += usize::from(!is_preempted);
                    let is_bare =
                        sequence.table.is_empty() && sequence.path_blocks == 0 && sequence.end == sequence.root;
                    self.expect(is_bare && (sequence.num_committed == 0 || !is_preempted), || {
                        format!("I2: {} sequence {} holds blocks", sequence.state.name(), sequence.serial)
                    });
                }
            }
            self.check_positions(sequence);
        }
        let counted = (pager.num_running, pager.num_running_pinned, pager.num_preempted, pager.num_swapped);
        self.expect(counted == (running, pinned, preempted, swapped), || {
            format!("I1: sequences are counted {counted:?} and are {:?}", (running, pinned, preempted, swapped))
        });
        Ok(())
    }

    /// What a sequence holds on the device that comes back is not in its places yet.
    fn check_swapping_in(&mut self, sequence: &Sequence) -> Result<()> {
        let Some((end, blocks)) = sequence.away.as_ref().and_then(|away| away.back) else {
            self.violations.push(format!("I2: sequence {} comes back from nowhere", sequence.serial));
            return Ok(());
        };
        let depth = self.pager.index.depth(end);
        self.expect(depth == blocks, || {
            format!("I2: sequence {} comes back to {blocks} blocks, which are {depth}", sequence.serial)
        });
        if !end.is_root() {
            self.pins[end.index()] += 1;
        }
        for &block in sequence.table.iter().skip(blocks) {
            self.count_hold(block, format_args!("sequence {}", sequence.serial))?;
        }
        Ok(())
    }

    fn check_positions(&mut self, sequence: &Sequence) {
        let block_size = self.pager.config().block_size;
        let Sequence { serial, num_cached, num_committed, len, path_blocks, .. } = *sequence;
        self.expect(num_cached as usize <= num_committed && num_committed <= len, || {
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

    pub(super) fn check_running(&mut self, sequence: &Sequence) -> Result<()> {
        let (pager, block_size) = (self.pager, self.pager.config().block_size);
        let serial = sequence.serial;
        let planned = pager.num_planned(sequence);
        let blocks = planned.max(sequence.len - 1).div_ceil(block_size);
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
            let blocks = pager.index[node].run.blocks(block_size);
            path.try_reserve(blocks.len())?;
            path.extend(blocks.iter().rev());
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
            return Ok(());
        }
        if !sequence.end.is_root() {
            self.pins[sequence.end.index()] += 1;
        }
        let first_duplicate =
            (0..path.len()).find(|&at| path[at] != sequence.table[at]).unwrap_or(Sequence::NO_DUPLICATE);
        self.expect(first_duplicate == sequence.first_duplicate, || {
            format!("I2: sequence {serial}'s first duplicate is {first_duplicate}, not {}", sequence.first_duplicate)
        });
        for (position, &block) in sequence.table.iter().enumerate() {
            if path.get(position) != Some(&block) {
                self.count_hold(block, format_args!("sequence {serial}"))?;
            }
        }
        let mut sorted = path;
        sorted.clear();
        sorted.try_reserve(sequence.table.len())?;
        sorted.extend_from_slice(&sequence.table);
        sorted.sort_unstable();
        sorted.dedup();
        self.expect(sorted.len() == sequence.table.len(), || format!("I2: sequence {serial} has a block twice"));
        Ok(())
    }

    /// Somebody holds a block that no path of his leads to.
    pub(super) fn count_hold(&mut self, block: BlockId, holder: fmt::Arguments<'_>) -> Result<()> {
        match self.pager.blocks.state(block) {
            BlockState::Private(_) => memory::push(&mut self.private, block)?,
            BlockState::Indexed => memory::push(&mut self.extra, block)?,
            BlockState::Free => self.violations.push(format!("I2: {holder} holds free block {block}")),
        }
        Ok(())
    }

    pub(super) fn check_copies(&mut self) -> Result<()> {
        for copy in self.pager.batches.iter().flat_map(Batch::lent_copies) {
            self.count_hold(copy.source, format_args!("the lent copy into {}", copy.target))?;
        }
        let copies = &self.pager.copies;
        let mut targets = with_capacity(copies.len())?;
        targets.extend(copies.iter().map(|(_, target)| target));
        targets.sort_unstable();
        for (source, target) in copies.iter() {
            self.count_hold(source, format_args!("the copy into {target}"))?;
            let is_both = targets.binary_search(&source).is_ok();
            self.expect(!is_both, || format!("I9: block {source} is source and target of queued copies"));
            self.expect(self.pager.blocks.state(target) != BlockState::Free, || {
                format!("I9: a copy into free block {target} is queued")
            });
        }
        Ok(())
    }

    /// I2: counted holders are the holders there are.
    pub(super) fn check_holds(&mut self) -> Result<()> {
        let pager = self.pager;
        self.private.sort_unstable();
        self.extra.sort_unstable();
        for block in 0..pager.config().num_blocks as BlockId {
            let expected = times(&self.private, block);
            if let BlockState::Private(holders) = pager.blocks.state(block) {
                self.expect(holders == expected, || {
                    format!("I2: private block {block} counts {holders} holders and has {expected}")
                });
            }
        }
        for (&block, extra) in &pager.extra_holds {
            let expected = times(&self.extra, block);
            self.expect(extra.holds == expected, || {
                format!("I2: indexed block {block} counts {} holds beside paths and has {expected}", extra.holds)
            });
            let node = &pager.index[extra.node];
            let is_last = node.run.blocks(pager.config().block_size).last() == Some(&block);
            self.expect(is_last, || format!("I2: block {block} is held but not the last of {:?}", extra.node));
            self.pins[extra.node.index()] += extra.holds;
        }
        for blocks in std::mem::take(&mut self.extra).chunk_by(|a, b| a == b) {
            let block = blocks[0];
            self.expect(pager.extra_holds.contains_key(&block), || {
                format!("I2: indexed block {block} is held beside paths and nobody counts it")
            });
        }
        let mut held_children = zeroed(pager.index.num_node_slots())?;
        for (_, child) in pager.index.nodes().filter(|(_, child)| child.is_held() && !child.parent.is_root()) {
            held_children[child.parent.index()] += 1;
        }
        for (id, node) in pager.index.nodes() {
            let expected = self.pins[id.index()];
            self.expect(node.pins == expected, || format!("I2: {id:?} counts {} pins and has {expected}", node.pins));
            let held = held_children[id.index()];
            self.expect(node.held_children == held, || {
                format!("I2: {id:?} counts {} held children and has {held}", node.held_children)
            });
        }
        Ok(())
    }
}

/// How often a block is in a sorted list.
fn times(sorted: &[BlockId], block: BlockId) -> u32 {
    let start = sorted.partition_point(|&other| other < block);
    sorted[start..].iter().take_while(|&&other| other == block).count() as u32
}
