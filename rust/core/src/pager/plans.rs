//! What becomes of plans: started, complete, failed, cancelled, abandoned, reclaimed. `docs/design/rules.md` 16.2.

use super::Pager;
use crate::error::{Error, Result};
use crate::evict::Context;
use crate::ids::BlockId;
use crate::memory::with_capacity;
use crate::transfers::{Plan, PlanId, PlanState, Tier, Work};

/// How a plan ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End<'a> {
    /// All blocks arrived.
    Complete,
    /// These arrived, or none.
    Failed(Option<&'a [bool]>),
    /// It was never started.
    Cancelled,
}

impl End<'_> {
    const fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Failed(_) => "fail",
            Self::Cancelled => "cancel",
        }
    }

    /// Did a block arrive?
    pub(super) fn is_done(self, nth: usize) -> bool {
        match self {
            Self::Complete => true,
            Self::Failed(done) => done.is_some_and(|done| done[nth]),
            Self::Cancelled => false,
        }
    }

    /// How many blocks arrived before the first that did not.
    pub(super) fn num_done(self, plan: &Plan) -> usize {
        (0..plan.targets.len()).take_while(|&nth| self.is_done(nth)).count()
    }
}

impl Pager {
    /// A mover copies now. False if that is not for the caller to see to: the plan has ended, or has been started for
    /// somebody who waits for the same.
    ///
    /// # Errors
    /// `Transfer` if it is abandoned; `Value` if it is no plan of this pager.
    pub fn start_plan(&mut self, id: PlanId, tick: Option<u64>) -> Result<bool> {
        if let Some(Plan { state: PlanState::Started(_), .. }) = self.plans.get(id)? {
            return Ok(false);
        }
        if !self.expect(id, "start", "planned")? {
            return Ok(false);
        }
        let tick = tick.unwrap_or(self.counters.clock_ticks);
        if let Some(plan) = self.plans.get_mut(id) {
            plan.state = PlanState::Started(tick);
        }
        Ok(true)
    }

    /// A plan ends. False if it has ended already.
    ///
    /// # Errors
    /// `Transfer` unless it is started (to be cancelled: planned); `Value` if it is no plan of this pager, or for a mask of
    /// the wrong length; `Memory`, and the plan goes on.
    pub fn end_plan(&mut self, id: PlanId, end: End<'_>) -> Result<bool> {
        let state = if end == End::Cancelled { "planned" } else { "started" };
        if !self.expect(id, end.name(), state)? {
            return Ok(false);
        }
        let Some(plan) = self.plans.get(id)? else { return Ok(false) };
        if let End::Failed(Some(done)) = end
            && done.len() != plan.targets.len()
        {
            return Err(Error::Value(format!(
                "done has {} values; the plan has {} blocks",
                done.len(),
                plan.targets.len()
            )));
        }
        // Asked for before anything changes: who leaves the device keeps a copy of its tokens.
        let mut lost = with_capacity(plan.targets.len())?;
        let tokens = if end == End::Complete { self.prepare_owner(id)? } else { None };
        let Some(mut plan) = self.plans.remove(id) else { return Ok(false) };
        match plan.work {
            Work::Offload { .. } => {
                self.end_offload(&plan, end, &mut lost);
                self.let_go_of_targets(Tier::Host, &lost);
            }
            Work::Fetch { .. } => self.end_fetch(&mut plan, end),
            Work::SwapOut { .. } => {
                self.end_swap_out(&mut plan, end == End::Complete, tokens);
                self.let_go_of_targets(Tier::Host, &plan.targets);
            }
            Work::SwapIn { .. } => self.end_swap_in(&mut plan, end == End::Complete),
            Work::Save { ref chains, .. } => self.end_save(chains, &plan.sources, end),
            Work::Load(ref load) => {
                self.end_load(load, &plan.targets, end.num_done(&plan), &mut lost);
                self.let_go_of_targets(Tier::Host, &lost);
            }
        }
        Ok(true)
    }

    /// Nobody knows what the mover does: what it may still write is set aside. False if the plan has ended.
    ///
    /// # Errors
    /// `Transfer` unless it is started; `Value` if it is no plan of this pager; `Memory`, and the plan goes on.
    pub fn abandon_plan(&mut self, id: PlanId) -> Result<bool> {
        if !self.expect(id, "abandon", "started")? {
            return Ok(false);
        }
        let tokens = self.tokens_of_members(id)?;
        self.plans.abandon(id);
        let Some(plan) = self.plans.get_mut(id) else { return Ok(false) };
        if let Work::Load(load) = &mut plan.work {
            let above = load.above.take();
            self.let_go_on_host(above);
            return Ok(true);
        }
        match plan.work.take() {
            // What a save reads stays held: the store might else be given something else.
            Some(Work::Save { .. } | Work::Load(_)) | None => {}
            Some(Work::Offload { chains }) => {
                for chain in chains {
                    self.let_go_on_host(chain.above);
                    self.let_go_for_plan(chain.end);
                }
            }
            Some(Work::Fetch { source, members, .. }) => {
                self.abandon_fetch(&members, tokens);
                self.let_go_on_host(source);
            }
            Some(Work::SwapOut { owner, .. }) => self.stay_on_device(owner),
            Some(Work::SwapIn { owner }) => self.settle_swap_in(owner, false),
        }
        Ok(true)
    }

    /// An abandoned plan's mover has stopped for certain. False if the plan has ended.
    ///
    /// # Errors
    /// `Transfer` unless it is abandoned; `Value` if it is no plan of this pager.
    pub fn reclaim_plan(&mut self, id: PlanId) -> Result<bool> {
        if !self.expect(id, "reclaim", "abandoned")? {
            return Ok(false);
        }
        if let Some(plan) = self.plans.remove(id) {
            match &plan.work {
                Work::Save { chains, .. } => self.end_save(chains, &plan.sources, End::Cancelled),
                work => self.let_go_of_targets(work.target(), &plan.targets),
            }
        }
        Ok(true)
    }

    /// A plan that has not ended.
    ///
    /// # Errors
    /// `Value` if it is no plan of this pager.
    pub fn find_plan(&self, id: PlanId) -> Result<Option<&Plan>> {
        self.plans.get(id)
    }

    /// The plans that have not ended, in the order in which they were made; with a tick, those that were started before.
    ///
    /// # Errors
    /// `Memory`.
    pub fn unfinished_plans(&self, older_than: Option<u64>) -> Result<Vec<&Plan>> {
        let mut plans = self.plans.in_order()?;
        if let Some(limit) = older_than {
            plans.retain(|plan| plan.state.tick().is_some_and(|tick| tick < limit));
        }
        Ok(plans)
    }

    /// Is the plan in this state? False if it has ended, which is counted.
    fn expect(&mut self, id: PlanId, call: &str, state: &str) -> Result<bool> {
        let Some(plan) = self.plans.get(id)? else {
            self.counters.late_reports += 1;
            return Ok(false);
        };
        let actual = plan.state.name();
        if actual == state {
            return Ok(true);
        }
        if matches!(plan.state, PlanState::Abandoned(_)) && state == "started" {
            // Nobody waits for it any more: what is said of it now is late, too.
            self.counters.late_reports += 1;
            return Ok(false);
        }
        Err(Error::Transfer(format!(
            "{call}: plan {} of generation {} is {actual}; the call is for one that is {state}",
            id.number, id.generation
        )))
    }

    /// A plan lets go of what it was to fill, last first.
    pub(super) fn let_go_of_targets(&mut self, tier: Tier, targets: &[BlockId]) {
        match (tier, &mut self.host) {
            (Tier::Host, Some(host)) => host.free(targets),
            (Tier::Host, None) | (Tier::Store, _) => {}
            (Tier::Device, _) => {
                for &block in targets.iter().rev() {
                    self.let_go_of_block(block, Context::COPY);
                }
            }
        }
    }
}
