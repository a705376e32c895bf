//! Offload: cold blocks are copied to the host before anybody needs their frames (background write-back), or as soon as
//! they are committed (write-through). `docs/design/rules.md` 16.3.
//!
//! Both copy *chains*: consecutive blocks of a path that are neither on the host nor on their way there, from the first
//! on, so that what the host has is prefix-closed. The device's blocks stay what they are, and where they are in the
//! policy's order; a queue remembers how far it has been offered, so that no call looks at the same block twice.

use std::ops::Range;

use super::Pager;
use super::plans::End;
use crate::content;
use crate::error::{Error, Result};
use crate::host::{Adopted, Host};
use crate::ids::{BlockId, CONTENT_START, Handle, NodeId, Token};
use crate::index::Found;
use crate::memory::with_capacity;
use crate::transfers::{Chain, Plan, PlanId, Work};

/// A plan in the making.
#[derive(Default)]
struct Draft {
    sources: Vec<BlockId>,
    targets: Vec<BlockId>,
    chains: Vec<Chain>,
    /// Blocks still wanted.
    wanted: usize,
}

/// What came of a look at a path.
enum Look {
    /// A chain was made.
    Made,
    /// Nothing of it can be copied.
    Nothing,
    /// There is no room for a chain, on the host or in the plan.
    NoRoom,
}

impl Pager {
    /// Plans to copy the coldest cached blocks that are not on the host, `num_blocks` at most. None if there are none, or
    /// no room for any.
    ///
    /// # Errors
    /// `Value` for no blocks; `Transfer` without a host tier or while copies are queued; `Memory`.
    pub fn offload(&mut self, num_blocks: usize) -> Result<Option<PlanId>> {
        if num_blocks == 0 {
            return Err(Error::Value("num_blocks is 0; it must be 1 or more".to_owned()));
        }
        self.check_can_read("offload")?;
        self.with_draft(num_blocks, |pager, draft| {
            for queue in 0..pager.evict.iter_queues().count() {
                while let Some(node) = pager.evict.unoffered(queue) {
                    if draft.wanted == 0 {
                        return Ok(());
                    }
                    let whole = Found { node, within: pager.index[node].run.len(), blocks: pager.index.depth(node) };
                    match pager.draft_chain(whole, draft)? {
                        Look::Made => {}
                        Look::Nothing => pager.evict.set_offered(queue, node),
                        Look::NoRoom => return Ok(()),
                    }
                }
            }
            Ok(())
        })
    }

    /// Plans to copy what a running sequence has published and is not on the host. None if there is nothing, or no room
    /// for any of it.
    ///
    /// # Errors
    /// `Stale`; `Transfer` as `offload`; `Memory`.
    pub fn offload_committed(&mut self, handle: Handle) -> Result<Option<PlanId>> {
        // Its row, if it has one, may have published more than the sequence knows of: that is brought home first.
        self.with_running(handle, "offload_committed", |pager, sequence| {
            let path = pager.index.live_part(sequence.end, sequence.path_blocks);
            pager.check_can_read("offload_committed")?;
            pager.with_draft(usize::MAX, |pager, draft| {
                while matches!(pager.draft_chain(path, draft)?, Look::Made) {}
                Ok(())
            })
        })
    }

    /// Copies that are still queued may have to fill what would be read.
    pub(super) fn check_can_read(&self, call: &str) -> Result<()> {
        if self.host.is_none() {
            return Err(Error::Transfer(format!(
                "{call}: this pager has no host blocks; build it with num_host_blocks"
            )));
        }
        if !self.copies.is_empty() {
            let queued = self.copies.len();
            return Err(Error::Transfer(format!(
                "{call}: {queued} block copies are queued; take_copies() and carry them out first, or step a batch"
            )));
        }
        Ok(())
    }

    fn with_draft(
        &mut self,
        wanted: usize,
        fill: impl FnOnce(&mut Self, &mut Draft) -> Result<()>,
    ) -> Result<Option<PlanId>> {
        self.plans.reserve()?;
        let mut draft = Draft { wanted, ..Draft::default() };
        let filled = fill(self, &mut draft);
        if draft.chains.is_empty() {
            return filled.map(|()| None);
        }
        // Where the allocator refused, what there is is a plan.
        let work = Work::Offload { chains: draft.chains };
        Ok(Some(self.plans.insert(draft.sources, draft.targets, work)))
    }

    /// Adds the first chain of a path, down to its end, that can be copied.
    fn draft_chain(&mut self, path: Found, draft: &mut Draft) -> Result<Look> {
        let block_size = self.config.block_size;
        let mut tokens = with_capacity(path.blocks * block_size)?;
        let root = self.index.push_path_tokens(path.node, path.blocks, &mut tokens);
        let Some(host) = &self.host else { return Ok(Look::Nothing) };
        let above = self.above(host, root, &tokens, path.blocks);
        let start = above.map_or(0, |above| above.blocks);
        let mut ids = with_capacity(path.blocks - start)?;
        self.index.push_path_blocks(path.node, path.blocks, start, &mut ids);

        let missing = self.plans.first_not_in_flight(&ids);
        let chain = start + missing.start..start + missing.end;
        // A run of content tokens is copied whole or not at all. It may go on behind the path, where nothing is known.
        let token = |at: usize| tokens.get(at).copied().unwrap_or(CONTENT_START);
        let safe = |blocks| content::cut_back(tokens.len() + 1, token, blocks, block_size);
        let end = safe(chain.end);
        if safe(start) != start || safe(chain.start) != chain.start || end <= chain.start {
            return Ok(Look::Nothing);
        }
        let above = above.filter(|above| above.blocks == chain.start);
        let num_takeable = host.room() - above.map_or(0, |above| host.idle_blocks(above));
        let most = safe(end.min(chain.start.saturating_add(num_takeable)));
        if most <= chain.start {
            return Ok(if num_takeable == 0 { Look::NoRoom } else { Look::Nothing });
        }
        // As many as are wanted, and then to the end of a run.
        let wanted = chain.start.saturating_add(draft.wanted);
        let stop = (wanted..most).find(|&blocks| safe(blocks) == blocks).unwrap_or(most);

        // Splits do not show; after them nothing can be refused.
        let end = self.end_at(self.index.locate(path, stop))?;
        let Some(host) = &mut self.host else { return Ok(Look::Nothing) };
        let above = above.map(|above| host.end_at(above)).transpose()?;
        let len = stop - chain.start;
        draft.sources.try_reserve(len)?;
        draft.targets.try_reserve(len)?;
        draft.chains.try_reserve(1)?;
        if let Some(above) = above {
            host.hold(above);
        }
        host.take(len, &mut draft.targets);
        let sources = &ids[chain.start - start..stop - start];
        draft.sources.extend_from_slice(sources);
        draft.chains.push(Chain { end, start: chain.start, len, above });
        draft.wanted = draft.wanted.saturating_sub(len);
        self.plans.begin_flight(sources);
        self.hold_for_plan(end);
        Ok(Look::Made)
    }

    /// The part of a path that the host has.
    fn above(&self, host: &Host, root: NodeId, tokens: &[Token], blocks: usize) -> Option<Found> {
        let root = host.index.find_root(&self.index.root(root).name)?;
        let found = host.index.walk(root, tokens, blocks);
        (found.blocks > 0).then_some(found)
    }

    /// An offload has ended, and so many of each chain's blocks as `arrived` says are on the host. Answers, in `lost`, the
    /// host blocks that came to nothing.
    pub(super) fn end_offload(&mut self, plan: &Plan, end: End<'_>, lost: &mut Vec<BlockId>) {
        let Work::Offload { chains } = &plan.work else { return };
        let mut at = 0;
        for chain in chains {
            let arrived = (at..at + chain.len).take_while(|&nth| end.is_done(nth)).count();
            let targets = &plan.targets[at..at + chain.len];
            at += chain.len;
            let new = self.settle_chain(chain, &targets[..arrived]);
            lost.extend_from_slice(&targets[..new.start]);
            lost.extend_from_slice(&targets[new.end..]);
            self.let_go_for_plan(chain.end);
        }
    }

    /// Indexes on the host what arrived of a chain and is still indexed here; answers which blocks of it were.
    fn settle_chain(&mut self, chain: &Chain, arrived: &[BlockId]) -> Range<usize> {
        let (block_size, clock) = (self.config.block_size, self.counters.clock_ticks);
        let blocks = chain.start + chain.len;
        let live = self.index.live_part(chain.end, blocks).blocks.saturating_sub(chain.start);
        let arrived = &arrived[..arrived.len().min(live)];
        let Some(host) = &mut self.host else { return 0..0 };
        let mut adopted = None;
        if !arrived.is_empty()
            && let Ok(mut tokens) = with_capacity(blocks * block_size)
        {
            let root = self.index.push_path_tokens(chain.end, blocks, &mut tokens);
            adopted = host.adopt(&self.index.root(root).name, &tokens, chain.start, arrived);
        }
        if let Some(above) = chain.above {
            host.let_go(above, clock);
        }
        let Some(Adopted { end, new }) = adopted else { return 0..0 };
        host.let_go(end, clock);
        self.counters.offloaded_blocks += new.len() as u64;
        new.start - chain.start..new.end - chain.start
    }
}
