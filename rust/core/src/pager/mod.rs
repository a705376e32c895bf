//! The pager: the only meeting point of pool, index, eviction and copies. It orders the calls below it.
//!
//! Every call first decides whether it can succeed (blocks, memory, arguments), then changes state by steps that
//! cannot fail (I7). The files beside this one hold a kind of call each; this one holds the state and what
//! they all do: hold and let go.

mod admit;
mod beams;
mod computing;
mod control;
mod fetch;
mod grow;
mod invalidate;
mod life;
mod offload;
mod plans;
mod publish;
mod read;
mod release;
mod rows;
mod step;
mod step_end;
mod store;
mod survey;
mod swap;
mod take;
mod transit;
mod victims;

use std::ops::Range;

use crate::batch::Batch;
use crate::blocks::{Blocks, State as BlockState};
use crate::config::Config;
use crate::copies::Copies;
use crate::error::{Error, Result};
use crate::evict::{Context, Departure, Eviction};
use crate::fences::Fences;
use crate::ghosts::Ghosts;
use crate::hash::Key;
use crate::host::Host;
use crate::ids::{BlockId, Handle, NodeId};
use crate::index::Index;
use crate::memory::Table;
use crate::preemptions::Log;
use crate::sequence::{Sequence, State};
use crate::slab::Slab;
use crate::stats::Counters;
use crate::transfers::Plans;
use crate::transit::Transit;

pub use crate::batch::{Counts, Outcome};
pub use admit::PrefixMatch;
pub(crate) use admit::check_tokens;
pub use computing::{Admitted, Computing};
pub(crate) use control::Controlled;
pub use control::Hint;
pub use fetch::Wish;
pub use life::FORK_MAX;
pub use plans::End;
pub use victims::{Asked, RecoveryCost, Victim, VictimPolicy};

/// A KV-cache pager.
#[derive(Debug)]
pub struct Pager {
    pub(crate) config: Config,
    pub(crate) blocks: Blocks,
    pub(crate) index: Index,
    pub(crate) evict: Eviction,
    pub(crate) copies: Copies,
    pub(crate) sequences: Slab<Sequence>,
    pub(crate) batches: Slab<Batch>,
    /// Indexed blocks that somebody holds beside the paths that lead to them: a table entry below its sequence's
    /// path, or a queued copy. Such a block is the last of its node's run, and each such hold is one of that node's
    /// pins. Rare: forks of what was not yet committed, and sequences truncated into a published block.
    pub(crate) extra_holds: Table<BlockId, ExtraHold>,
    /// Who computes the block behind a path: end of the path and hash of the block -> sequences, each with another
    /// block.
    pub(crate) announced: Table<(NodeId, u32), Vec<Handle>>,
    pub(crate) counters: Counters,
    /// The second tier, where there is one.
    pub(crate) host: Option<Box<Host>>,
    pub(crate) plans: Plans,
    pub(crate) fences: Fences,
    /// What offloads read.
    pub(crate) in_transit: Transit,
    /// Running sequences, and how many of those only hold a prefix.
    pub(crate) num_running: usize,
    pub(crate) num_running_pinned: usize,
    pub(crate) num_preempted: usize,
    pub(crate) num_swapped: usize,
    /// Sequences that have come back.
    pub(crate) num_returns: u64,
    /// The last preemptions.
    pub(crate) preemptions: Log,
    /// What the last evicted blocks were.
    pub(crate) ghosts: Ghosts,
    /// Sequences that the last reorder of beams has released: memory for the children of the next one.
    #[expect(clippy::vec_box, reason = "the slab takes them as they are")]
    pub(crate) left_beams: Vec<Box<Sequence>>,
    /// Steps and batches of copies that were handed out and not taken back: the kernels' order.
    pub(crate) num_launches: u64,
    /// Load control, where somebody asked for it.
    pub(crate) controlled: Option<Box<Controlled>>,
}

/// Holds of an indexed block that are no paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtraHold {
    pub node: NodeId,
    pub holds: u32,
}

impl Pager {
    /// A pager with an empty pool.
    ///
    /// # Errors
    /// `Config` for a setting outside its limits; `Memory` if the allocator refuses.
    pub fn new(config: Config) -> Result<Self> {
        let key = Key::from_seed(config.seed);
        Self::with_key(config, key)
    }

    /// A pager with a hash key of the caller's choice. For tests of collisions only.
    ///
    /// # Errors
    /// As `new`.
    #[doc(hidden)]
    pub fn with_key(config: Config, key: Key) -> Result<Self> {
        config.validate()?;
        let mut index = Index::new(config.num_blocks, config.block_size, key)?;
        if config.num_ghost_blocks > 0 {
            index.keep_traces(config.num_blocks)?;
        }
        Ok(Self {
            blocks: Blocks::new(config.num_blocks, config.null_block)?,
            index,
            evict: Eviction::new(config.policy, config.num_blocks)?,
            copies: Copies::default(),
            sequences: Slab::default(),
            batches: Slab::default(),
            extra_holds: Table::default(),
            announced: Table::default(),
            counters: Counters::default(),
            host: match config.num_host_blocks {
                0 => None,
                blocks => Some(Box::new(Host::new(blocks, config.block_size, key)?)),
            },
            plans: Plans::new(if config.num_host_blocks > 0 { config.num_blocks } else { 0 })?,
            fences: Fences::new(config.num_host_blocks > 0),
            in_transit: Transit::default(),
            num_running: 0,
            num_running_pinned: 0,
            num_preempted: 0,
            num_swapped: 0,
            num_returns: 0,
            preemptions: Log::default(),
            ghosts: Ghosts::new(config.num_ghost_blocks)?,
            left_beams: Vec::new(),
            num_launches: 0,
            controlled: None,
            config,
        })
    }

    // ---- sequences -------------------------------------------------------------------------------------------------

    /// Runs `call` on a running sequence.
    fn with_running<R>(
        &mut self,
        handle: Handle,
        name: &'static str,
        call: impl FnOnce(&mut Self, &mut Sequence) -> Result<R>,
    ) -> Result<R> {
        self.with_state(handle, name, State::Running, call)
    }

    fn with_state<R>(
        &mut self,
        handle: Handle,
        name: &'static str,
        state: State,
        call: impl FnOnce(&mut Self, &mut Sequence) -> Result<R>,
    ) -> Result<R> {
        let Some(mut sequence) = self.sequences.take(handle) else {
            return Err(Error::Stale { sequence: handle.serial, state: "released", call: name });
        };
        self.leave_row(&mut sequence);
        let result = if sequence.state == state {
            call(self, &mut sequence)
        } else {
            Err(Error::Stale { sequence: handle.serial, state: sequence.state.name(), call: name })
        };
        self.sequences.put_back(handle, sequence);
        result
    }

    /// Counts a call that is refused for want of blocks.
    fn counted<R>(&mut self, result: Result<R>) -> Result<R> {
        if let Err(Error::OutOfBlocks { .. } | Error::NeverFits { .. }) = result {
            self.counters.refused_calls += 1;
        }
        result
    }

    // ---- hold and let go -------------------------------------------------------------------------------------------

    /// Pins a node: it and all above it are held.
    fn hold(&mut self, end: NodeId, pins: u32) {
        if end.is_root() {
            return;
        }
        let mut node = end;
        let mut was_idle = self.index.pin(node, pins);
        while was_idle {
            self.evict.dequeue(node, self.index[node].run.len());
            self.fences.clear_node(node);
            let parent = self.index[node].parent;
            if parent.is_root() {
                break;
            }
            was_idle = self.index.add_held_child(parent);
            node = parent;
        }
    }

    /// Unpins a node. What nobody holds any more becomes cached, or free if it was forgotten, deepest first.
    fn let_go(&mut self, end: NodeId, context: Context) {
        if end.is_root() {
            return;
        }
        let mut node = end;
        let mut is_idle = self.index.unpin(node);
        while is_idle {
            let parent = self.index[node].parent;
            self.settle(node, context);
            if parent.is_root() {
                break;
            }
            is_idle = self.index.remove_held_child(parent);
            node = parent;
        }
        self.rebalance();
    }

    /// The last holder of a node left.
    fn settle(&mut self, node: NodeId, context: Context) {
        if self.index.is_live(node) {
            let run = &mut self.index[node].run;
            run.shrink(self.config.block_size);
            let blocks = run.len();
            self.evict.enqueue(node, blocks, self.counters.clock_ticks, context);
            self.fences.note_node(node);
        } else if !self.evict.slot(node).is_in_transit() {
            self.free_node(node);
        }
    }

    /// Frees the blocks of a dead node, deepest first, and the node.
    fn free_node(&mut self, node: NodeId) {
        let run = std::mem::take(&mut self.index[node].run);
        for &block in run.blocks(self.config.block_size).iter().rev() {
            self.free(block);
        }
        self.fences.clear_node(node);
        self.index.remove(node);
    }

    /// Splits a node behind its first `at` blocks, for the index and for eviction; answers the upper half.
    fn split(&mut self, node: NodeId, at: usize) -> Result<NodeId> {
        let upper = self.index.split(node, at)?;
        self.evict.split(node, upper);
        self.fences.split(node, upper);
        if self.evict.slot(node).is_in_transit() {
            self.in_transit.split(upper);
        }
        Ok(upper)
    }

    /// Moves what the policy finds too much in one queue to another, block by block: a node in part is split.
    fn rebalance(&mut self) {
        while let Some(excess) = self.evict.excess() {
            let Some(node) = self.evict.coldest_of(excess.from) else {
                break;
            };
            let blocks = self.index[node].run.len();
            // The deeper part moves. Without memory for a split the queue stays too long for now.
            if blocks > excess.blocks && self.split(node, blocks - excess.blocks).is_err() {
                break;
            }
            self.evict.demote(node, blocks.min(excess.blocks), excess.to);
        }
    }

    /// One more table entry or queued copy holds a block that is in somebody's table already.
    fn hold_block(&mut self, block: BlockId, holds: u32) {
        if let Some(extra) = self.extra_holds.get_mut(&block) {
            extra.holds += holds;
            let node = extra.node;
            self.hold(node, holds);
        } else {
            self.blocks.hold(block, holds);
        }
    }

    /// A table entry outside its sequence's path, or a queued copy, lets go of a block.
    fn let_go_of_block(&mut self, block: BlockId, context: Context) {
        if let Some(extra) = self.extra_holds.get_mut(&block) {
            extra.holds -= 1;
            let node = extra.node;
            if extra.holds == 0 {
                self.extra_holds.remove(&block);
            }
            self.let_go(node, context);
        } else if self.blocks.let_go(block) {
            self.free(block);
        }
    }

    /// Pushes a block that nobody holds; a copy that was to fill it is withdrawn.
    fn free(&mut self, block: BlockId) {
        self.blocks.push(block);
        self.fences.note_block(block);
        self.withdraw_copy_into(block);
    }

    fn withdraw_copy_into(&mut self, block: BlockId) {
        if self.copies.has_targets()
            && let Some(source) = self.copies.withdraw(block)
        {
            self.let_go_of_block(source, Context::COPY);
        }
    }

    /// Calls `f` with each table entry in a range of positions that is not on the sequence's path, deepest first.
    fn each_table_only(&mut self, sequence: &Sequence, range: Range<usize>, mut f: impl FnMut(&mut Self, BlockId)) {
        let stop = range.end.min(sequence.table.len());
        for position in (range.start.max(sequence.path_blocks)..stop).rev() {
            f(self, sequence.table[position]);
        }
        let from = range.start.max(sequence.first_duplicate);
        let (mut node, mut end) = (sequence.end, sequence.path_blocks);
        while end > from {
            let start = end - self.index[node].run.len();
            for position in (start.max(from)..end.min(stop)).rev() {
                let block = sequence.table[position];
                if block != self.index[node].run.blocks(self.config.block_size)[position - start] {
                    f(self, block);
                }
            }
            (node, end) = (self.index[node].parent, start);
        }
    }

    /// What the pager has of a sequence for its policy.
    fn context(sequence: &Sequence, departure: Departure) -> Context {
        Context { sequence: Some(sequence.serial), pinned: sequence.pinned, departure }
    }

    /// May the sequence write to this block? Copies that read it are carried out before any kernel writes.
    pub(crate) fn is_writable(&self, block: BlockId) -> bool {
        self.blocks.is_sole(block)
            || match self.blocks.state(block) {
                BlockState::Private(holders) => holders - self.copies.readers(block) == 1,
                BlockState::Indexed | BlockState::Free => false,
            }
    }

    // ---- settings --------------------------------------------------------------------------------------------------

    /// The settings.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }
}
