//! The stampede: who computes a prefix that others will want, so that they can wait instead of computing it again.

use super::Pager;
use crate::batch::PLACEHOLDER;
use crate::content;
use crate::ids::{Handle, Token};
use crate::index::Found;
use crate::memory;
use crate::sequence::Sequence;

/// A sequence that computes what a prompt wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Computing {
    /// Its number.
    pub sequence: u64,
    /// So many tokens of the prompt it will have computed.
    pub num_tokens: usize,
}

/// What an admission came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admitted {
    /// It has begun.
    Sequence(Handle),
    /// It had better wait.
    Computing(Computing),
}

impl Pager {
    /// Who computes the block behind a hit, and how far it goes on.
    pub(super) fn computing_behind(&self, found: Found, tokens: &[Token]) -> Option<Computing> {
        let block_size = self.config.block_size;
        let (start, limit) = (found.blocks * block_size, (tokens.len() - 1) / block_size);
        let ends_there = found.node.is_root() || found.within == self.index[found.node].run.len();
        if self.announced.is_empty() || !ends_there || found.blocks >= limit {
            return None;
        }
        let key = (found.node, self.index.hash(found.node, &tokens[start..start + block_size]));
        for &handle in self.announced.get(&key)? {
            let Some(sequence) = self.sequences.get(handle) else { continue };
            let common = sequence.tail.common_tokens(&tokens[start..limit * block_size], block_size) / block_size;
            let blocks = found.blocks + common;
            let blocks = content::cut_back(tokens.len(), |at| tokens[at], blocks, block_size);
            if common > 0 && blocks > found.blocks {
                return Some(Computing { sequence: sequence.serial, num_tokens: blocks * block_size });
            }
        }
        None
    }

    /// Announces the block behind a sequence's path, if it is to be computed and nobody else has. Where the allocator
    /// refuses, nobody waits for it.
    pub(super) fn announce(&mut self, sequence: &mut Sequence) {
        let block_size = self.config.block_size;
        let is_computed = sequence.num_committed >= (sequence.path_blocks + 1) * block_size;
        if sequence.tail.len() < block_size || is_computed || !self.config.prefix_cache || !self.may_publish(sequence) {
            return;
        }
        let block = sequence.tail.block(0, block_size);
        if block.contains(&PLACEHOLDER) {
            return;
        }
        let key = (sequence.end, self.index.hash(sequence.end, block));
        let is_same =
            |other: &Handle| self.sequences.get(*other).is_some_and(|other| other.tail.block(0, block_size) == block);
        if self.announced.get(&key).is_some_and(|others| others.iter().any(is_same))
            || self.announced.try_reserve(1).is_err()
        {
            return;
        }
        let others = self.announced.entry(key).or_default();
        if memory::push(others, Handle { slot: sequence.slot, serial: sequence.serial }).is_ok() {
            sequence.announced = Some(key);
        } else if others.is_empty() {
            self.announced.remove(&key);
        }
    }

    /// Takes a sequence's announcement back.
    pub(super) fn withdraw(&mut self, sequence: &mut Sequence) {
        let Some(key) = sequence.announced.take() else { return };
        if let Some(announced) = self.announced.get_mut(&key) {
            announced.retain(|handle| handle.serial != sequence.serial);
            if announced.is_empty() {
                self.announced.remove(&key);
            }
        }
    }
}
