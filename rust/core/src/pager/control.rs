//! Admission under load control: what runs, as the controller has to see it, and its answer carried out.
//!
//! Nothing is kept of a sequence but its `life`, so there is nothing that a caller could forget to say: how far it is, and that
//! it has ended, the pager knows.

use super::Pager;
use super::admit::check_tokens;
use super::computing::Admitted;
use super::fetch::Wish;
use crate::admission::projection::{Member, Projection};
use crate::admission::survival::Survival;
use crate::admission::{Control, Life, Reason, Settings, Verdict, Wait};
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::{Handle, PlanId, Token};
use crate::index::Found;
use crate::memory::with_capacity;
use crate::sequence::{Sequence, State};

/// A controller, and what it found out for the state of the pool that `seen` names (`Pager::state_now`).
#[derive(Debug)]
pub(crate) struct Controlled {
    pub(super) control: Control,
    seen: Option<[u64; 8]>,
    projection: Projection,
    survivals: Vec<Survival>,
}

/// What a caller says with a request.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Hint<'a> {
    /// The kind of request.
    pub kind: &'a str,
    /// Tokens of the answer, at most.
    pub max_tokens: Option<u32>,
    /// Tokens of the answer, as far as is known.
    pub expected_tokens: Option<u32>,
    /// Sequences that it will be forked into, itself included; 0: as 1.
    pub samples: u16,
    /// What it got when it had to wait before.
    pub ticket: Option<u64>,
}

impl Pager {
    /// From now on a controller decides who comes in by `try_enter`; answers what names it. One before it is gone.
    ///
    /// # Errors
    /// `Config`.
    pub fn set_control(&mut self, settings: Settings) -> Result<u64> {
        let mut control = Control::new(settings)?;
        control.generation = self.controlled.as_ref().map_or(0, |old| old.control.generation + 1);
        let generation = control.generation;
        let (projection, survivals) = (Projection::default(), Vec::new());
        self.controlled = Some(Box::new(Controlled { control, seen: None, projection, survivals }));
        Ok(generation)
    }

    /// Admits a prompt if it fits and those who run are not expected to run out of blocks. (It is never pinned.)
    ///
    /// # Errors
    /// As `admit`, but for what a verdict says; `Value` if another controller has taken over.
    pub fn try_enter(
        &mut self,
        generation: u64,
        tokens: &[Token],
        namespace: &[u8],
        wish: Wish,
        hint: Hint<'_>,
    ) -> Result<Verdict<Admitted>> {
        let plan = self.plan(tokens, namespace);
        let (found, refused) = match &plan {
            Ok(admission) => (admission.found, None),
            Err(Error::OutOfBlocks { needed, free, evictable, .. }) => {
                (self.find(tokens, namespace), Some((*needed, free + evictable)))
            }
            Err(Error::NeverFits { needed, usable, .. }) => {
                let (needed, usable) = (*needed, *usable);
                self.checked_control(generation)?;
                self.counters.refused_calls += 1;
                return Ok(Verdict::Never { needed, usable });
            }
            Err(_) => return Err(plan.err().unwrap_or(Error::EmptyPrompt)),
        };
        let block_size = self.config.block_size;
        let blocks = tokens.len().div_ceil(block_size);
        let shared = self.held_blocks(found);
        self.checked_control(generation)?;
        // Now, since from here on the controller learns of the request.
        check_tokens(tokens, 0)?;
        let kind = self.checked_control(generation)?.kind(hint.kind)?;
        if wish.wait
            && let Some(computing) = found.and_then(|found| self.computing_behind(found, tokens))
        {
            // It keeps its place among those that wait.
            self.checked_control(generation)?.turns.ask(hint.ticket);
            return Ok(Verdict::In(Admitted::Computing(computing)));
        }
        let Hint { samples, max_tokens: most, expected_tokens: expected, .. } = hint;
        let life = Life { kind: kind as u16, samples, prompt: tokens.len() as u32, most, expected };
        let one = life.member(tokens.len() as u32, blocks as u32, shared as u32, block_size as u32);
        if let Some(wait) = self.refusal(&life, &one, hint.ticket, refused) {
            return Ok(self.wait(wait, hint.ticket));
        }
        let before = self.state_now();
        let entered = match (plan, wish.fetch) {
            (Ok(admission), None) => self.begin(tokens, namespace, false, &admission).map(Admitted::Sequence),
            _ => self.admit_as(tokens, namespace, Wish { pinned: false, wait: false, ..wish }),
        };
        let admitted = match entered {
            Ok(admitted) => admitted,
            Err(Error::OutOfBlocks { needed, free, evictable, .. }) => {
                return Ok(self.wait((Reason::Blocks, needed, free + evictable), hint.ticket));
            }
            Err(error) => return Err(error),
        };
        if let Admitted::Sequence(handle) = admitted
            && let Some(sequence) = self.sequences.get_mut(handle)
        {
            sequence.life = life;
        }
        self.entered(before, &life, &one, shared > 0, hint.ticket);
        Ok(Verdict::In(admitted))
    }

    /// Admits a preempted or swapped sequence again, under the same rules.
    ///
    /// # Errors
    /// As `resume`, but for what a verdict says.
    pub fn try_reenter(&mut self, generation: u64, handle: Handle, ticket: Option<u64>) -> Result<Verdict<()>> {
        self.return_with(generation, handle, ticket, |pager| pager.resume(handle))
    }

    /// Plans to bring a swapped sequence back, under the same rules.
    ///
    /// # Errors
    /// As `swap_in`, but for what a verdict says.
    pub fn try_return(&mut self, generation: u64, handle: Handle, ticket: Option<u64>) -> Result<Verdict<PlanId>> {
        self.return_with(generation, handle, ticket, |pager| pager.swap_in(handle))
    }

    fn return_with<T>(
        &mut self,
        generation: u64,
        handle: Handle,
        ticket: Option<u64>,
        enter: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Verdict<T>> {
        self.checked_control(generation)?;
        let sequence = match self.sequences.get(handle) {
            Some(sequence) if matches!(sequence.state, State::Preempted | State::Swapped) => sequence,
            // The call itself says what is wrong.
            _ => return enter(self).map(Verdict::In),
        };
        let (block_size, len) = (self.config.block_size, sequence.len);
        let (blocks, usable) = (len.div_ceil(block_size), self.config.usable_blocks());
        if blocks > usable {
            self.counters.refused_calls += 1;
            return Ok(Verdict::Never { needed: blocks, usable });
        }
        let life = sequence.life;
        let mut tokens = with_capacity(len)?;
        self.copy_tokens(sequence, &mut tokens);
        let shared = self.held_blocks(self.find(&tokens, self.namespace(sequence)));
        let one = life.member(len as u32, blocks as u32, shared as u32, block_size as u32);
        if let Some(wait) = self.refusal(&life, &one, ticket, None) {
            return Ok(self.wait(wait, ticket));
        }
        let before = self.state_now();
        match enter(self) {
            Ok(answer) => {
                // It was among those that wait.
                self.entered(before, &life, &one, true, ticket);
                Ok(Verdict::In(answer))
            }
            Err(Error::OutOfBlocks { needed, free, evictable, .. }) => {
                // The pager has counted this one.
                self.counters.refused_calls -= 1;
                Ok(self.wait((Reason::Blocks, needed, free + evictable), ticket))
            }
            Err(error) => Err(error),
        }
    }

    /// A request that waits goes away.
    ///
    /// # Errors
    /// `Value` if another controller has taken over.
    pub fn give_up(&mut self, generation: u64, ticket: u64) -> Result<()> {
        self.checked_control(generation)?.turns.give_up(ticket);
        Ok(())
    }

    /// The mean and the standard deviation of the blocks that will be held, by steps from now.
    ///
    /// # Errors
    /// `Value` if another controller has taken over.
    pub fn outlook(&mut self, generation: u64) -> Result<Vec<(u32, f64, f64)>> {
        self.checked_control(generation)?;
        self.project();
        let Some(controlled) = &self.controlled else { return Ok(Vec::new()) };
        Ok(controlled
            .projection
            .points()
            .iter()
            .map(|point| {
                let rounding = point.rounding / 3.0;
                (point.steps, point.mean, (point.variance + rounding * rounding).sqrt())
            })
            .collect())
    }

    /// The share of a kind's answers that have so many tokens or more.
    ///
    /// # Errors
    /// `Value` if another controller has taken over, or for a kind that nobody has named.
    pub fn survival(&mut self, generation: u64, kind: &str, tokens: &[u32]) -> Result<Vec<f64>> {
        let survival = self.survival_of(generation, kind)?;
        Ok(tokens.iter().map(|&tokens| survival.share(tokens)).collect())
    }

    /// How many tokens answers of a kind that have so many still get, on average.
    ///
    /// # Errors
    /// As `survival`.
    pub fn mean_left(&mut self, generation: u64, kind: &str, answered: &[u32]) -> Result<Vec<f64>> {
        let survival = self.survival_of(generation, kind)?;
        Ok(answered.iter().map(|&answered| survival.mean_left(answered)).collect())
    }

    fn survival_of(&mut self, generation: u64, kind: &str) -> Result<&Survival> {
        let found = self.checked_control(generation)?.find_kind(kind);
        self.project();
        let survivals = self.controlled.as_ref().map_or(&[][..], |controlled| &controlled.survivals);
        found
            .and_then(|kind| survivals.get(kind as usize))
            .ok_or_else(|| Error::Value(format!("no request of kind {kind:?} was seen")))
    }

    /// A sequence is about to end: its length says how long answers get.
    pub(super) fn note_end(&mut self, handle: Handle, departure: Departure) {
        if self.controlled.is_none() {
            return;
        }
        let Some(sequence) = self.sequences.get(handle).filter(|sequence| !sequence.pinned) else { return };
        let (kind, answered) = (sequence.life.kind, self.len_now(sequence).saturating_sub(sequence.life.prompt));
        if let Some(controlled) = &mut self.controlled {
            controlled.control.end(u32::from(kind), answered, departure == Departure::Finished);
        }
    }

    fn checked_control(&mut self, generation: u64) -> Result<&mut Control> {
        match &mut self.controlled {
            Some(controlled) if controlled.control.generation == generation => Ok(&mut controlled.control),
            _ => Err(Error::Value("another Admission controls this pager now: a pager has one".to_owned())),
        }
    }

    /// Why a request has to wait, with what is needed and what there is; None if it may come in.
    fn refusal(
        &mut self,
        life: &Life,
        one: &Member,
        ticket: Option<u64>,
        refused: Option<(usize, usize)>,
    ) -> Option<(Reason, usize, usize)> {
        let is_idle = self.num_running == self.num_running_pinned;
        let available = self.num_free_blocks() + self.num_evictable_blocks();
        let is_turn = self.controlled.as_mut().is_none_or(|controlled| controlled.control.turns.ask(ticket));
        if let Some((needed, available)) = refused {
            return Some((Reason::Blocks, needed, available));
        }
        if is_idle {
            return None;
        }
        if !is_turn {
            return Some((Reason::Turn, one.blocks as usize, available));
        }
        let risk = self.controlled.as_ref().map_or(1.0, |controlled| controlled.control.settings().risk);
        if risk >= 1.0 {
            return None;
        }
        let usable = self.config.usable_blocks();
        if risk <= 0.0 {
            let block_size = self.config.block_size as u32;
            let blocks = (life.prompt + one.answered).div_ceil(block_size);
            let most = life.most_blocks(one.answered, block_size).unwrap_or(usable).max(blocks as usize);
            let needed = most - (blocks - one.blocks) as usize + self.promised_blocks();
            return (needed > available).then_some((Reason::Growth, needed, available));
        }
        self.project();
        let controlled = self.controlled.as_ref()?;
        let (forks, fork) = life.forks(one.answered, self.config.block_size as u32);
        let with_forks = (forks > 0).then(|| {
            let mut projection = controlled.projection.clone();
            let survival = &controlled.survivals[fork.kind.min(controlled.survivals.len() - 1)];
            (0..forks).for_each(|_| projection.add(&fork, survival));
            projection
        });
        let projection = with_forks.as_ref().unwrap_or(&controlled.projection);
        let needed = controlled.control.most_with(projection, one, &controlled.survivals);
        (needed > usable).then_some((Reason::Growth, needed, usable))
    }

    /// A request waits.
    fn wait<T>(&mut self, (reason, needed, available): (Reason, usize, usize), ticket: Option<u64>) -> Verdict<T> {
        self.counters.refused_calls += 1;
        let (ticket, passed_over) = match (&mut self.controlled, ticket) {
            (Some(controlled), None) => (controlled.control.turns.ticket(), 0),
            (Some(controlled), Some(ticket)) => (ticket, controlled.control.turns.passed_over(ticket)),
            (None, _) => (0, 0),
        };
        Verdict::Wait(Wait { reason, needed, available, ticket, passed_over })
    }

    /// A request came in. What was found out for the state before is still so, with one more; unless others share with it
    /// what was theirs alone (`changes_others`), or it will be forked.
    fn entered(&mut self, before: [u64; 8], life: &Life, one: &Member, changes_others: bool, ticket: Option<u64>) {
        let now = self.state_now();
        let Some(controlled) = &mut self.controlled else { return };
        controlled.control.turns.enter(ticket);
        if controlled.seen != Some(before) || changes_others || life.samples > 1 {
            controlled.seen = None;
        } else if let Some(survival) = controlled.survivals.get(one.kind) {
            controlled.projection.add(one, survival);
            controlled.seen = Some(now);
        }
    }

    /// Blocks of what was found that somebody holds: who comes in shares them.
    fn held_blocks(&self, found: Option<Found>) -> usize {
        found.map_or(0, |found| found.blocks - self.idle_blocks(found, |_| true))
    }

    /// Blocks that all who run may still take, each with its longest answer: a copy of a last block that others hold, too, and
    /// what follows. Whoever has no limit may take them all.
    fn promised_blocks(&self) -> usize {
        let (block_size, usable) = (self.config.block_size, self.config.usable_blocks());
        let running = self.sequences.iter().filter(|sequence| Self::is_member(sequence));
        running
            .map(|sequence| {
                let len = self.len_now(sequence);
                let answered = len.saturating_sub(sequence.life.prompt);
                let most = sequence.life.most_blocks(answered, block_size as u32).unwrap_or(usable);
                // A block that was reserved beyond the tokens is its own.
                let next = sequence.table.get(len as usize / block_size);
                let is_copied = next.is_some_and(|&block| !self.is_writable(block));
                most.saturating_sub(sequence.table.len()) + usize::from(is_copied)
            })
            .sum()
    }

    /// Does it grow and end? Others who hold blocks, prefixes and what is on its way to the host, are counted as they are.
    fn is_member(sequence: &Sequence) -> bool {
        !sequence.pinned && sequence.state.is_on_device() && sequence.state != State::SwappingOut
    }

    /// Blocks of its path that others hold, too: its end does not give them back.
    fn shared_blocks(&self, sequence: &Sequence) -> usize {
        let (mut node, mut holds) = (sequence.end, (1, 0));
        while !node.is_root() && (self.index[node].pins, self.index[node].held_children) == holds {
            (node, holds) = (self.index[node].parent, (0, 1));
        }
        self.index.depth(node)
    }

    /// Its tokens. A row that keeps any knows more than the sequence.
    fn len_now(&self, sequence: &Sequence) -> u32 {
        self.row_seen(sequence).map_or(sequence.len as u32, |row| row.len)
    }

    /// Changes when the pool, or who runs, does, or with a step.
    fn state_now(&self) -> [u64; 8] {
        [
            self.num_free_blocks() as u64,
            self.num_evictable_blocks() as u64,
            self.num_running as u64,
            self.num_preempted as u64,
            self.num_swapped as u64,
            self.num_launches,
            self.counters.clock_ticks,
            self.sequences.next_serial(),
        ]
    }

    /// Finds out how long answers get, and what all will hold.
    fn project(&mut self) {
        let now = self.state_now();
        // Of a kind that was named since then it knows nothing.
        let is_old = |controlled: &mut Box<Controlled>| {
            controlled.seen != Some(now) || controlled.survivals.len() < controlled.control.num_kinds()
        };
        let Some(mut controlled) = self.controlled.take_if(is_old) else { return };
        let block_size = self.config.block_size as u32;
        let mut members = Vec::with_capacity(self.num_running);
        let (mut waiting, mut to_come) = (Vec::new(), Vec::new());
        let mut held = 0;
        for sequence in self.sequences.iter().filter(|sequence| !sequence.pinned) {
            let len = self.len_now(sequence);
            if Self::is_member(sequence) {
                let (blocks, shared) = (sequence.table.len() as u32, self.shared_blocks(sequence) as u32);
                let member = sequence.life.member(len, blocks, shared, block_size);
                held += member.blocks as usize;
                let (forks, fork) = sequence.life.forks(member.answered, block_size);
                to_come.extend(std::iter::repeat_n(fork, forks));
                members.push(member);
            } else {
                waiting.push((sequence.life.kind as usize, len.saturating_sub(sequence.life.prompt)));
            }
        }
        let running = members.iter().map(|member| (member.kind, member.answered));
        controlled.survivals = controlled.control.survivals(running.chain(waiting.iter().copied()));
        let kinds = controlled.survivals.len();
        members.append(&mut to_come);
        // Of another controller's kinds nothing is known.
        for member in &mut members {
            member.kind *= usize::from(member.kind < kinds);
        }
        let active = self.config.usable_blocks() - self.num_free_blocks() - self.num_evictable_blocks();
        let fixed = active.saturating_sub(held);
        controlled.projection = Projection::new(&members, &controlled.survivals, block_size, fixed);
        controlled.seen = Some(now);
        self.controlled = Some(controlled);
    }
}
