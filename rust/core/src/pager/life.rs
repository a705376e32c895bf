//! The life of a sequence after admission: fork, truncate, preempt, release.

use super::{Context, ExtraHold, Pager};
use crate::admission::Life;
use crate::batch::Seat;
use crate::blocks::HOLDERS_MAX;
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::{BlockId, CONTENT_START, Handle, NodeId};
use crate::index::Found;
use crate::memory::with_capacity;
use crate::preemptions::{Action, Preemption, Why};
use crate::sequence::{Sequence, State};
use crate::tail::Tail;

/// Most children of one call: a slip of the caller must not use up the machine.
pub const FORK_MAX: usize = 65_536;
/// Most tokens of all children of one call, unless it is one child. Each has a table and an unpublished tail of its
/// own: without a bound, 65,536 children of a long prompt would copy gigabytes while every other call waits.
const FORK_TOKENS_MAX: usize = 1 << 28;

/// The tokens of a sequence that holds no blocks of the device.
pub(super) struct Known {
    tail: Tail,
    has_content: bool,
}

impl Pager {
    /// `count` children that share every block.
    ///
    /// # Errors
    /// `Stale`; `Value` for no child or too many (65,536, or 2^28 tokens in all of them); `Memory`.
    pub fn fork(&mut self, handle: Handle, count: usize) -> Result<Vec<Handle>> {
        self.with_running(handle, "fork", |pager, sequence| {
            let children = pager.children_of(sequence, count)?;
            let mut handles = with_capacity(count)?;
            pager.sequences.reserve(count)?;
            pager.adopt(sequence, children.into_iter(), &mut handles);
            Ok(handles)
        })
    }

    /// Children that hold nothing yet.
    #[expect(clippy::vec_box, reason = "the slab takes them as they are")]
    pub(super) fn children_of(&self, parent: &Sequence, count: usize) -> Result<Vec<Box<Sequence>>> {
        let room = HOLDERS_MAX as usize - self.num_running - self.num_preempted - self.num_swapped;
        let limit = FORK_MAX.min(room).min((FORK_TOKENS_MAX / parent.len).max(1));
        if count == 0 || count > limit {
            let len = parent.len;
            return Err(Error::Value(format!(
                "n is {count}; it must be 1 to {limit} for a sequence of {len} tokens: {FORK_MAX} children and {FORK_TOKENS_MAX} tokens in all of them, at most"
            )));
        }
        let mut children = with_capacity(count)?;
        for _ in 0..count {
            children.push(self.child_of(parent)?);
        }
        Ok(children)
    }

    /// The children hold what their parent holds, and run. There is room for them.
    pub(super) fn adopt(
        &mut self,
        parent: &mut Sequence,
        children: impl ExactSizeIterator<Item = Box<Sequence>>,
        handles: &mut Vec<Handle>,
    ) {
        self.hold_like(parent, children.len() as u32);
        // Those that were to come are there.
        parent.life.samples = usize::from(parent.life.samples).saturating_sub(children.len()).max(1) as u16;
        handles.extend(children.map(|child| self.start_child(child)));
    }

    /// So many children hold what their parent holds.
    pub(super) fn hold_like(&mut self, parent: &Sequence, more: u32) {
        let shared = self.blocks_of_known(parent);
        self.index.root_mut(parent.root).pins += more;
        self.hold(parent.end, more);
        self.each_table_only(parent, 0..shared, |pager, block| pager.hold_block(block, more));
    }

    /// A child runs, which holds its blocks already. There is room for it.
    pub(super) fn start_child(&mut self, mut child: Box<Sequence>) -> Handle {
        self.num_running += 1;
        child.serial = self.sequences.next_serial();
        let handle = self.sequences.insert(child);
        if let Some(child) = self.sequences.get_mut(handle) {
            child.slot = handle.slot;
        }
        handle
    }

    /// Table entries that a child shares: those of the known tokens.
    fn blocks_of_known(&self, parent: &Sequence) -> usize {
        parent.table.len().min(self.num_known(parent).div_ceil(self.config.block_size))
    }

    /// A child knows what is known, and shares the blocks of that.
    pub(super) fn child_of(&self, parent: &Sequence) -> Result<Box<Sequence>> {
        self.child(parent, Vec::new(), Tail::default()).map(Box::new)
    }

    /// The same in the memory of a sequence that has ended.
    pub(super) fn child_in(&self, parent: &Sequence, mut ended: Box<Sequence>) -> Result<Box<Sequence>> {
        ended.table.clear();
        ended.tail.clear();
        *ended = self.child(parent, std::mem::take(&mut ended.table), std::mem::take(&mut ended.tail))?;
        Ok(ended)
    }

    fn child(&self, parent: &Sequence, mut table: Vec<BlockId>, mut tail: Tail) -> Result<Sequence> {
        let block_size = self.config.block_size;
        let len = self.num_known(parent);
        let blocks = self.blocks_of_known(parent);
        table.try_reserve_exact(blocks)?;
        table.extend_from_slice(&parent.table[..blocks]);
        for slice in parent.tail.slices(block_size) {
            tail.extend(slice, block_size)?;
        }
        if len < parent.len {
            tail.truncate(len - parent.path_blocks * block_size, block_size);
        }
        Ok(Self::like(parent, table, tail, len))
    }

    /// What a sequence that has let go of all that it held becomes as the child of one without a tail. Its table has room.
    pub(super) fn turn_into_child(ended: &mut Sequence, parent: &Sequence, common_blocks: usize) {
        let (mut table, mut tail) = (std::mem::take(&mut ended.table), std::mem::take(&mut ended.tail));
        table.truncate(common_blocks);
        table.extend_from_slice(&parent.table[common_blocks..]);
        tail.clear();
        *ended = Sequence { slot: ended.slot, ..Self::like(parent, table, tail, parent.len) };
    }

    fn like(parent: &Sequence, table: Vec<BlockId>, tail: Tail, len: usize) -> Sequence {
        // What is forked from a held prefix runs.
        Sequence {
            table,
            tail,
            len,
            pinned: false,
            lost_tokens: 0,
            back: (0, 0),
            seat: Seat::None,
            announced: None,
            plan: None,
            away: None,
            life: Life { samples: 1, ..parent.life },
            ..*parent
        }
    }

    /// Keeps the first `len` tokens.
    ///
    /// # Errors
    /// `Stale`; `Value` unless `1 <= len <= the sequence's`; `Memory`.
    pub fn truncate(&mut self, handle: Handle, len: usize) -> Result<()> {
        self.with_running(handle, "truncate", |pager, sequence| {
            if len == 0 || len > sequence.len {
                return Err(Error::Value(format!(
                    "num_tokens is {len}; it must be 1 to {}, the sequence's length",
                    sequence.len
                )));
            }
            if len / pager.config.block_size < sequence.path_blocks {
                pager.cut_path(sequence, len)?;
            }
            pager.cut_table(sequence, len.div_ceil(pager.config.block_size));
            pager.cut_tokens(sequence, len);
            pager.void(sequence, len);
            pager.patch(sequence, sequence.table.len());
            Ok(())
        })
    }

    /// Keeps the first `blocks` entries of a table, all of the path among them.
    pub(super) fn cut_table(&mut self, sequence: &mut Sequence, blocks: usize) {
        let context = Self::context(sequence, Departure::Moved);
        self.each_table_only(sequence, blocks..usize::MAX, |pager, block| pager.let_go_of_block(block, context));
        sequence.table.truncate(blocks);
    }

    /// Keeps the first `len` tokens, all of the path among them.
    pub(super) fn cut_tokens(&mut self, sequence: &mut Sequence, len: usize) {
        let block_size = self.config.block_size;
        if len < (sequence.path_blocks + 1) * block_size {
            self.withdraw(sequence);
        }
        sequence.tail.truncate(len - sequence.path_blocks * block_size, block_size);
        sequence.len = len;
        sequence.num_cached = sequence.num_cached.min(len as u32);
        sequence.num_committed = sequence.num_committed.min(len);
    }

    /// The new end lies on the path: the path ends there, and a block that the cut goes through stays in the table,
    /// shared and partial.
    fn cut_path(&mut self, sequence: &mut Sequence, len: usize) -> Result<()> {
        let block_size = self.config.block_size;
        let (path_blocks, blocks) = (len / block_size, len.div_ceil(block_size));
        // Whatever can be refused comes first; splits do not show.
        let (partial, tail) = self.partial_block(sequence, path_blocks, len % block_size)?;
        let end = self.end_at(self.place(sequence, path_blocks))?;
        self.extra_holds.try_reserve(usize::from(partial.is_some()))?;

        // Cut back above what was forgotten, it still publishes nothing more.
        sequence.is_silent |= !self.index.is_live(sequence.end);
        self.hold(end, 1);
        if let Some(node) = partial {
            let extra = self.extra_holds.entry(sequence.table[path_blocks]).or_insert(ExtraHold { node, holds: 0 });
            extra.holds += 1;
            self.hold(node, 1);
        }
        self.cut_table(sequence, blocks);
        self.let_go(sequence.end, Self::context(sequence, Departure::Moved));
        if sequence.first_duplicate >= path_blocks {
            sequence.first_duplicate = Sequence::NO_DUPLICATE;
        }
        (sequence.end, sequence.path_blocks) = (end, path_blocks);
        sequence.has_content |= tail.1 >= CONTENT_START;
        sequence.tail = tail.0;
        Ok(())
    }

    /// For a cut that leaves `rest` tokens of the block at `position` of the path: the node that ends with that
    /// block, if the table has it too (and no duplicate of it), and a tail of these tokens.
    fn partial_block(
        &mut self,
        sequence: &Sequence,
        position: usize,
        rest: usize,
    ) -> Result<(Option<NodeId>, (Tail, u32))> {
        if rest == 0 {
            return Ok((None, (Tail::default(), 0)));
        }
        let block_size = self.config.block_size;
        let node = self.end_at(self.place(sequence, position + 1))?;
        let run = &self.index[node].run;
        let last = run.len() - 1;
        let tail = Tail::from_tokens(&run.tokens(block_size)[last * block_size..][..rest], block_size)?;
        let is_shared = run.blocks(block_size)[last] == sequence.table[position];
        Ok((is_shared.then_some(node), tail))
    }

    /// The place where the first `blocks` blocks of the sequence's path end.
    fn place(&self, sequence: &Sequence, blocks: usize) -> Found {
        let end = sequence.end;
        let within = if end.is_root() { 0 } else { self.index[end].run.len() };
        self.index.locate(Found { node: end, within, blocks: sequence.path_blocks }, blocks)
    }

    /// Gives all blocks back; the handle and the tokens stay.
    ///
    /// # Errors
    /// `Stale`; `Memory`.
    pub fn preempt(&mut self, handle: Handle, why: Why) -> Result<()> {
        self.with_running(handle, "preempt", |pager, sequence| {
            let tokens = pager.known_tokens(sequence)?;
            pager.preempt_with(sequence, handle, tokens, why);
            Ok(())
        })
    }

    /// What a sequence keeps that gives its blocks back.
    pub(super) fn known_tokens(&self, sequence: &Sequence) -> Result<Known> {
        let mut tokens = with_capacity(sequence.len)?;
        self.copy_tokens(sequence, &mut tokens);
        tokens.truncate(self.num_known(sequence));
        let (tail, bits) = Tail::from_tokens(&tokens, self.config.block_size)?;
        Ok(Known { tail, has_content: bits >= CONTENT_START })
    }

    pub(super) fn preempt_with(&mut self, sequence: &mut Sequence, handle: Handle, tokens: Known, why: Why) {
        self.leave_device(sequence, handle, tokens, Action::Recompute, why);
        sequence.state = State::Preempted;
        sequence.lost_tokens = std::mem::take(&mut sequence.num_committed) as u32;
        sequence.num_cached = 0;
        self.num_preempted += 1;
        self.counters.preemptions += 1;
    }

    /// A sequence gives its blocks back, and keeps its tokens. The log tells of it.
    pub(super) fn leave_device(
        &mut self,
        sequence: &mut Sequence,
        handle: Handle,
        tokens: Known,
        action: Action,
        why: Why,
    ) {
        self.vacate(sequence, handle);
        let room = self.num_free_blocks() + self.num_evictable_blocks();
        self.give_back(sequence, Self::context(sequence, Departure::Preempted));
        self.preemptions.add(Preemption {
            number: 0,
            tick: self.counters.clock_ticks,
            sequence: sequence.serial,
            action,
            blocks: self.num_free_blocks() + self.num_evictable_blocks() - room,
            tokens: sequence.num_committed,
            why,
        });
        sequence.num_preemptions = sequence.num_preemptions.saturating_add(1);
        sequence.len = tokens.tail.len();
        sequence.tail = tokens.tail;
        sequence.has_content |= tokens.has_content;
        (sequence.end, sequence.path_blocks) = (sequence.root, 0);
        sequence.table = Vec::new();
        sequence.first_duplicate = Sequence::NO_DUPLICATE;
    }

    /// The last preemptions, oldest first.
    #[must_use]
    pub fn preemptions(&self) -> impl ExactSizeIterator<Item = &Preemption> {
        self.preemptions.iter()
    }

    /// A sequence has come back.
    pub(super) fn note_return(&mut self, sequence: &mut Sequence) {
        self.num_returns += 1;
        sequence.back = (self.sequences.next_serial(), self.num_returns);
    }

    /// Ends a sequence. A released handle is no error: the call does nothing and is counted.
    pub fn release(&mut self, handle: Handle, departure: Departure) {
        self.note_end(handle, departure);
        let Some(state) = self.sequences.get(handle).map(|sequence| sequence.state) else {
            self.counters.noop_calls += 1;
            return;
        };
        self.counters.finished_sequences += u64::from(departure == Departure::Finished);
        if matches!(state, State::SwappingOut | State::SwappingIn) {
            self.end_in_transit(handle, departure);
        } else {
            self.end(handle, departure);
        }
    }

    /// Ends a sequence that no plan moves; answers what was kept of it, unless it was released before.
    pub(super) fn end(&mut self, handle: Handle, departure: Departure) -> Option<Box<Sequence>> {
        let mut sequence = self.sequences.take(handle)?;
        self.vacate(&mut sequence, handle);
        let context = Self::context(&sequence, departure);
        match sequence.state {
            State::Running => self.give_back(&sequence, context),
            State::Preempted => self.num_preempted -= 1,
            State::Fetching => {
                self.give_back(&sequence, context);
                self.leave_fetch(&sequence);
            }
            State::Swapped => self.give_back_host(&mut sequence),
            State::SwappingOut | State::SwappingIn => unreachable!("I9: a plan moves it"),
        }
        self.unpin_root(sequence.root);
        self.sequences.retire(handle);
        self.counters.clock_ticks += 1;
        Some(sequence)
    }

    /// Ends a sequence whose handle was dropped; does nothing if it was released in the meantime.
    pub fn release_dropped(&mut self, handle: Handle) {
        if self.sequences.get(handle).is_some() {
            self.release(handle, Departure::Aborted);
            self.counters.dropped_handles += 1;
        }
    }

    fn give_back(&mut self, sequence: &Sequence, context: Context) {
        self.give_back_blocks(sequence, context);
        self.count_running(sequence, false);
    }

    /// Lets go of a sequence's table and path.
    pub(super) fn give_back_blocks(&mut self, sequence: &Sequence, context: Context) {
        self.each_table_only(sequence, 0..usize::MAX, |pager, block| pager.let_go_of_block(block, context));
        self.let_go(sequence.end, context);
    }

    /// One sequence more, or less, holds blocks of the device.
    pub(super) fn count_running(&mut self, sequence: &Sequence, is_more: bool) {
        let count = |number: &mut usize, one: usize| *number = if is_more { *number + one } else { *number - one };
        count(&mut self.num_running, 1);
        count(&mut self.num_running_pinned, usize::from(sequence.pinned));
    }
}
