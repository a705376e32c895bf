//! Swap: a running sequence's blocks go to the host and come back. `docs/design/rules.md` 16.5.
//!
//! What of its path is on the host already is only held there. The rest is copied; when that has arrived, full blocks of
//! its path join the host's index, so that the next sequence with the same prefix finds them, and what is behind stays
//! the sequence's own. While bytes move, the sequence goes on holding what is read, and the plan what is written.

use super::Pager;
use super::admit::{Admission, Supply};
use super::life::Known;
use crate::batch::Seat;
use crate::error::{Error, Result};
use crate::evict::{Context, Departure};
use crate::host::{Adopted, Away};
use crate::ids::{BlockId, Handle, NodeId, Token};
use crate::index::Found;
use crate::memory::with_capacity;
use crate::preemptions::{Action, Why};
use crate::sequence::{Sequence, State};
use crate::transfers::{Owner, Plan, PlanId, PlanState, Tier, Work};

impl Pager {
    /// Plans to move a sequence to the host.
    ///
    /// # Errors
    /// `Stale` unless it is running; `Step` while an open step names it; `Transfer` without a host tier or while copies
    /// are queued; `NeverFits` and `OutOfBlocks` of the host; `Memory`.
    pub fn swap_out(&mut self, handle: Handle, why: Why) -> Result<PlanId> {
        self.with_running(handle, "swap_out", |pager, sequence| {
            if pager.is_named(sequence) {
                return Err(Error::Step(format!(
                    "swap_out: an open step names sequence {}; commit the step, or cancel it first",
                    handle.serial
                )));
            }
            pager.check_can_read("swap_out")?;
            let plan = pager.plan_swap_out(sequence, handle, why);
            pager.counted(plan)
        })
    }

    fn plan_swap_out(&mut self, sequence: &mut Sequence, handle: Handle, why: Why) -> Result<PlanId> {
        let block_size = self.config.block_size;
        let kept = sequence.num_committed.div_ceil(block_size);
        if self.copies.has_targets() && sequence.table.iter().any(|&block| self.copies.is_target(block)) {
            return Err(Error::Transfer(format!(
                "swap_out: an open step is to fill a block of sequence {}; commit the step first",
                sequence.serial
            )));
        }
        // What the host has of it is held there, too.
        let usable = self.host.as_ref().map_or(0, |host| host.num_blocks());
        if kept > usable {
            return Err(Error::NeverFits { needed: kept, usable, tier: Tier::Host });
        }
        let on_host = self.find_on_host(sequence)?;
        let start = on_host.map_or(0, |found| found.blocks);
        let mut sources = with_capacity(kept - start)?;
        self.index.push_path_blocks(sequence.end, sequence.path_blocks, start, &mut sources);
        sources.truncate(kept - start);
        let behind = start.max(sequence.path_blocks).min(kept);
        sources.extend_from_slice(&sequence.table[behind..kept]);
        let mut targets = with_capacity(sources.len())?;
        self.plans.reserve()?;

        let Some(host) = &mut self.host else { return Err(Error::Memory) };
        let (free, idle) = (host.num_free(), on_host.map_or(0, |found| host.idle_blocks(found)));
        let evictable = host.evict.evictable() - idle;
        if sources.len() > free + evictable {
            let (needed, total, rows, tier) = (sources.len(), host.num_blocks(), Box::default(), Tier::Host);
            return Err(Error::OutOfBlocks { needed, free, evictable, total, rows, reserve: 0, tier });
        }
        // Splits do not show; after this nothing can be refused.
        let end = on_host.map(|found| host.end_at(found)).transpose()?;
        if let Some(end) = end {
            host.hold(end);
        }
        host.take(sources.len(), &mut targets);
        sequence.away = Some(Box::new(Away { end, path_blocks: start, own: Vec::new(), back: None, why }));
        self.vacate(sequence, handle);
        let work = Work::SwapOut { owner: Owner::Sequence(handle), start };
        let id = self.plans.insert(sources, targets, work);
        (sequence.state, sequence.plan) = (State::SwappingOut, Some(id));
        Ok(id)
    }

    /// The part of a sequence's live path that the host has.
    fn find_on_host(&self, sequence: &Sequence) -> Result<Option<Found>> {
        let block_size = self.config.block_size;
        let live = self.index.live_part(sequence.end, sequence.path_blocks);
        let limit = live.blocks.min(sequence.num_committed / block_size);
        if limit == 0 {
            return Ok(None);
        }
        let mut tokens = with_capacity(sequence.len)?;
        self.copy_tokens(sequence, &mut tokens);
        Ok(self.host.as_ref().and_then(|host| host.find(self.namespace(sequence), &tokens, limit)))
    }

    /// What the owner of a swap-out needs when it is complete: its tokens, and room for the blocks of its own.
    pub(super) fn prepare_owner(&mut self, id: PlanId) -> Result<Option<Known>> {
        let plan = self.plans.get(id)?;
        let Some(Plan { work: Work::SwapOut { owner: Owner::Sequence(handle), .. }, targets, .. }) = plan else {
            return Ok(None);
        };
        if let Some(away) = self.sequences.get_mut(*handle).and_then(|sequence| sequence.away.as_mut()) {
            away.own.try_reserve_exact(targets.len())?;
        }
        self.sequences.get(*handle).map(|sequence| self.known_tokens(sequence)).transpose()
    }

    /// A swap-out has ended; `tokens` if all blocks arrived. The targets that came to nothing stay the plan's.
    pub(super) fn end_swap_out(&mut self, plan: &mut Plan, is_complete: bool, tokens: Option<Known>) {
        let Some(Work::SwapOut { owner, start }) = plan.work.take() else { return };
        self.counters.swap_outs += u64::from(is_complete);
        let (Owner::Sequence(handle), Some(tokens)) = (&owner, tokens) else {
            return self.stay_on_device(owner);
        };
        let handle = *handle;
        let Some(mut sequence) = self.sequences.take(handle) else { return };
        sequence.plan = None;
        self.move_to_host(&mut sequence, start, &mut plan.targets);
        sequence.is_silent |= !self.index.is_live(sequence.end);
        self.counters.swapped_tokens += sequence.num_committed as u64;
        let why = sequence.away.as_mut().map(|away| std::mem::take(&mut away.why)).unwrap_or_default();
        self.leave_device(&mut sequence, handle, tokens, Action::Swap, why);
        sequence.state = State::Swapped;
        self.num_swapped += 1;
        self.sequences.put_back(handle, sequence);
    }

    /// A swap-out came to nothing, or nobody waits for it any more.
    pub(super) fn stay_on_device(&mut self, owner: Owner) {
        match owner {
            Owner::Sequence(handle) => {
                let Some(mut sequence) = self.sequences.take(handle) else { return };
                sequence.plan = None;
                self.leave_host(&mut sequence);
                sequence.state = State::Running;
                self.announce(&mut sequence);
                self.sequences.put_back(handle, sequence);
            }
            Owner::Released(mut sequence) => {
                let context = Self::context(&sequence, Departure::Aborted);
                self.give_back_blocks(&sequence, context);
                self.leave_host(&mut sequence);
                self.unpin_root(sequence.root);
            }
            Owner::Nobody => {}
        }
    }

    /// All blocks of a sequence have arrived, from block `start` of its table on. Takes out of `targets` what the
    /// sequence or the index has from now on.
    fn move_to_host(&mut self, sequence: &mut Sequence, start: usize, targets: &mut Vec<BlockId>) {
        let (block_size, clock) = (self.config.block_size, self.counters.clock_ticks);
        let live = self.index.live_part(sequence.end, sequence.path_blocks).blocks;
        let limit = live.min(sequence.num_committed / block_size);
        let mut tokens = Vec::new();
        if limit > start && tokens.try_reserve_exact(sequence.len).is_ok() {
            self.copy_tokens(sequence, &mut tokens);
        }
        let (Some(away), Some(host)) = (&mut sequence.away, &mut self.host) else { return };
        let above = away.end;
        let mut num_lost = 0;
        if !tokens.is_empty()
            && above.is_none_or(|above| host.index.is_live(above))
            && let name = &self.index.root(sequence.root).name
            && let Some(Adopted { end, new }) = host.adopt(name, &tokens, start, &targets[..limit - start])
        {
            if let Some(above) = above {
                host.let_go(above, clock);
            }
            (away.end, away.path_blocks) = (Some(end), new.end);
            num_lost = new.start - start;
        }
        away.own.extend_from_slice(&targets[away.path_blocks - start..]);
        targets.truncate(num_lost);
    }

    /// A sequence lets go of what it has on the host.
    fn leave_host(&mut self, sequence: &mut Sequence) {
        if let (Some(away), Some(host)) = (sequence.away.take(), &mut self.host) {
            host.give_back(&away, self.counters.clock_ticks);
        }
    }

    /// The same for a swapped one, which is none from now on.
    pub(super) fn give_back_host(&mut self, sequence: &mut Sequence) {
        self.leave_host(sequence);
        self.num_swapped -= 1;
    }

    /// A plan lets go of a node of the host.
    pub(super) fn let_go_on_host(&mut self, node: Option<NodeId>) {
        if let (Some(node), Some(host)) = (node, &mut self.host) {
            host.let_go(node, self.counters.clock_ticks);
        }
    }

    /// Sequences that were released while a plan reads their blocks, which they go on holding.
    pub(crate) fn released_while_leaving(&self) -> impl Iterator<Item = &Sequence> {
        self.plans.iter().filter_map(|plan| match &plan.work {
            Work::SwapOut { owner: Owner::Released(sequence), .. } => Some(&**sequence),
            _ => None,
        })
    }

    /// What sequences have on the host, those included that were released while a plan moves them.
    pub(crate) fn aways(&self) -> impl Iterator<Item = &Away> {
        let released = self.plans.iter().filter_map(|plan| match &plan.work {
            Work::SwapOut { owner: Owner::Released(sequence), .. }
            | Work::SwapIn { owner: Owner::Released(sequence) } => Some(&**sequence),
            _ => None,
        });
        self.sequences.iter().chain(released).filter_map(|sequence| sequence.away.as_deref())
    }

    // ---- and back --------------------------------------------------------------------------------------------------

    /// Plans to bring a sequence back.
    ///
    /// # Errors
    /// `Stale` unless it is swapped; `OutOfBlocks`; `NeverFits`; `Memory`.
    pub fn swap_in(&mut self, handle: Handle) -> Result<PlanId> {
        self.with_state(handle, "swap_in", State::Swapped, |pager, sequence| {
            let found = pager.find_way_back(sequence)?;
            let kept = sequence.num_committed.div_ceil(pager.config.block_size);
            let blocks = sequence.len.div_ceil(pager.config.block_size);
            let usable = pager.config.usable_blocks();
            if blocks > usable {
                return pager.counted(Err(Error::NeverFits { needed: blocks, usable, tier: Tier::Device }));
            }
            let brought = kept - found.blocks;
            let plan = pager.plan_from(Some(found), blocks, Supply::Transfer(brought), || Ok(()));
            let admission = pager.counted(plan)?;
            pager.begin_swap_in(sequence, handle, found, &admission, brought)
        })
    }

    /// Where on the device the sequence's blocks go on to be found.
    fn find_way_back(&self, sequence: &Sequence) -> Result<Found> {
        let none = Found { node: sequence.root, within: 0, blocks: 0 };
        if self.is_forgotten(sequence) || !self.index.is_live(sequence.root) {
            return Ok(none);
        }
        let mut tokens: Vec<Token> = with_capacity(sequence.len)?;
        self.copy_tokens(sequence, &mut tokens);
        Ok(self.index.find(sequence.root, &tokens, sequence.num_committed / self.config.block_size))
    }

    /// Was a block of what it has on the host forgotten?
    pub(super) fn is_forgotten(&self, sequence: &Sequence) -> bool {
        let end = sequence.away.as_ref().and_then(|away| away.end);
        end.is_some_and(|end| self.host.as_ref().is_some_and(|host| !host.index.is_live(end)))
    }

    fn begin_swap_in(
        &mut self,
        sequence: &mut Sequence,
        handle: Handle,
        found: Found,
        admission: &Admission,
        brought: usize,
    ) -> Result<PlanId> {
        let start = found.blocks;
        let (Some(away), Some(host)) = (&mut sequence.away, &self.host) else { return Err(Error::Memory) };
        let mut sources = with_capacity(brought)?;
        if let Some(end) = away.end {
            host.index.push_path_blocks(end, away.path_blocks, start, &mut sources);
        }
        sources.truncate(brought);
        sources.extend_from_slice(&away.own[start.saturating_sub(away.path_blocks).min(away.own.len())..]);
        debug_assert_eq!(sources.len(), brought);
        let mut targets = with_capacity(brought)?;
        let mut table = with_capacity(admission.blocks)?;
        self.plans.reserve()?;
        let end = self.end_at(found)?;

        self.hold(end, 1);
        self.index.push_path_blocks(end, start, 0, &mut table);
        self.take_unfenced(brought, &mut table);
        targets.extend_from_slice(&table[start..]);
        self.take(admission.blocks - table.len(), &mut table);
        for &block in &targets {
            self.blocks.hold(block, 1);
        }
        away.back = Some((end, start));
        sequence.table = table;
        let id = self.plans.insert(sources, targets, Work::SwapIn { owner: Owner::Sequence(handle) });
        (sequence.state, sequence.plan) = (State::SwappingIn, Some(id));
        self.count_running(sequence, true);
        self.num_swapped -= 1;
        Ok(id)
    }

    /// A swap-in has ended.
    pub(super) fn end_swap_in(&mut self, plan: &mut Plan, is_complete: bool) {
        let Some(Work::SwapIn { owner }) = plan.work.take() else { return };
        self.counters.swap_ins += u64::from(is_complete);
        self.let_go_of_targets(Tier::Device, &plan.targets);
        self.settle_swap_in(owner, is_complete);
    }

    pub(super) fn settle_swap_in(&mut self, owner: Owner, is_complete: bool) {
        match owner {
            Owner::Sequence(handle) => {
                let Some(mut sequence) = self.sequences.take(handle) else { return };
                sequence.plan = None;
                if is_complete {
                    self.arrive(&mut sequence);
                } else {
                    self.turn_back(&mut sequence);
                }
                self.sequences.put_back(handle, sequence);
            }
            Owner::Released(mut sequence) => self.leave_host(&mut sequence),
            Owner::Nobody => {}
        }
    }

    /// A sequence is back on the device.
    fn arrive(&mut self, sequence: &mut Sequence) {
        let block_size = self.config.block_size;
        if let Some((end, blocks)) = sequence.away.as_mut().and_then(|away| away.back.take()) {
            sequence.tail.advance(blocks, block_size);
            (sequence.end, sequence.path_blocks) = (end, blocks);
        }
        sequence.is_silent |= self.is_forgotten(sequence);
        self.leave_host(sequence);
        sequence.state = State::Running;
        self.note_return(sequence);
        let end = sequence.num_committed;
        sequence.num_committed = sequence.path_blocks * block_size;
        self.commit_to(sequence, end);
        self.announce(sequence);
    }

    /// A sequence did not come back: it gives back what it has on the device.
    fn turn_back(&mut self, sequence: &mut Sequence) {
        let context = Self::context(sequence, Departure::Moved);
        if let Some((end, blocks)) = sequence.away.as_mut().and_then(|away| away.back.take()) {
            for at in (blocks..sequence.table.len()).rev() {
                self.let_go_of_block(sequence.table[at], context);
            }
            self.let_go(end, context);
        }
        sequence.table = Vec::new();
        sequence.state = State::Swapped;
        self.count_running(sequence, false);
        self.num_swapped += 1;
    }

    /// A sequence is released while a plan moves it.
    pub(super) fn end_in_transit(&mut self, handle: Handle, departure: Departure) {
        let Some(sequence) = self.sequences.take(handle) else { return };
        let context = Self::context(&sequence, departure);
        if let Some(sequence) = self.release_in_transit(sequence, context) {
            self.unpin_root(sequence.root);
        }
        self.sequences.retire(handle);
        self.counters.clock_ticks += 1;
    }

    /// If nobody has started the plan, it is cancelled first. Answers the sequence, unless the plan has it from now on.
    fn release_in_transit(&mut self, mut sequence: Box<Sequence>, context: Context) -> Option<Box<Sequence>> {
        let id = sequence.plan.take()?;
        let plan = self.plans.get_mut(id)?;
        let is_planned = plan.state == PlanState::Planned;
        let is_leaving = sequence.state == State::SwappingOut;
        if is_planned {
            let plan = self.plans.remove(id)?;
            if is_leaving {
                self.leave_host(&mut sequence);
            }
            self.let_go_of_targets(plan.work.target(), &plan.targets);
        }
        if is_leaving {
            self.count_running(&sequence, false);
            if is_planned {
                self.give_back_blocks(&sequence, context);
                return Some(sequence);
            }
        } else {
            self.turn_back(&mut sequence);
            self.num_swapped -= 1;
            if is_planned {
                self.leave_host(&mut sequence);
                return Some(sequence);
            }
        }
        sequence.seat = Seat::None;
        let root = sequence.root;
        if let Some(Plan { work: Work::SwapOut { owner, .. } | Work::SwapIn { owner }, .. }) = self.plans.get_mut(id) {
            *owner = Owner::Released(sequence);
        }
        if !is_leaving {
            self.unpin_root(root);
        }
        None
    }
}
