//! Who gives way when the pool is full, and how (`docs/design/rules.md` 18.2). A peek: it looks at the candidates, and at
//! nothing else.

#![expect(
    clippy::cast_precision_loss,
    reason = "positions are below 2^31, and pairs of them are rounded as Python does"
)]

use std::cmp::{Ordering, Reverse};

use super::Pager;
use super::release::{Release, Seen};
use crate::error::{Error, Result};
use crate::ids::Handle;
use crate::memory::{push, with_capacity};
use crate::preemptions::Action;
use crate::sequence::{Sequence, State};
use crate::transfers::Tier;

/// Who gives way first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VictimPolicy {
    /// Who came in last.
    Newest,
    /// Who is cheapest to bring back for what he frees.
    Cheapest,
    /// Who has the least to lose.
    LeastProgress,
    /// Who has the lowest priority.
    Priority,
}

impl VictimPolicy {
    /// What names a policy, in words.
    pub const NAMES: &'static str = "newest, cheapest, least_progress, priority";

    /// The policy of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Newest, Self::Cheapest, Self::LeastProgress, Self::Priority].into_iter().find(|each| each.name() == name)
    }

    /// The policy's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::Cheapest => "cheapest",
            Self::LeastProgress => "least_progress",
            Self::Priority => "priority",
        }
    }

    const fn picked(self) -> &'static str {
        match self {
            Self::Newest => "came in last",
            Self::Cheapest => "is the cheapest to bring back for what it frees",
            Self::LeastProgress => "has the least to lose",
            Self::Priority => "has the lowest priority",
        }
    }
}

/// What bringing a sequence back costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RecoveryCost {
    /// To compute a token.
    pub token: f64,
    /// Of attention, a pair of tokens.
    pub pair: f64,
    /// For each cached token before those that are computed.
    pub cached_token: f64,
    /// To move a block one way; infinite: that cannot be done.
    pub block: f64,
    /// Of a prefill at least.
    pub least: f64,
    /// A row that sits out a step.
    pub row_step: f64,
}

impl Default for RecoveryCost {
    fn default() -> Self {
        Self { token: 1.0, pair: 0.0, cached_token: 0.0, block: f64::INFINITY, least: 0.0, row_step: 1.0 }
    }
}

/// What is asked. The binding has checked that lists fit each other.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Blocks that a call needs in all.
    pub needed: usize,
    /// Who goes first.
    pub policy: VictimPolicy,
    /// Who may go; none: all that run and are not pinned.
    pub candidates: Option<Vec<Handle>>,
    /// One for each candidate, for `Priority`.
    pub priorities: Vec<i64>,
    /// In the caller's unit.
    pub cost: RecoveryCost,
    /// Preemptions of a level.
    pub spare_after: u64,
    /// Candidates that stay in any case.
    pub keep: usize,
    /// Candidates that sit out if it comes to that.
    pub left_out: Vec<usize>,
    /// Steps until each candidate ends, where that is known; empty: nowhere.
    pub finishing: Vec<Option<u64>>,
}

/// One who gives way.
#[derive(Clone, PartialEq, Debug)]
pub struct Victim {
    /// The sequence.
    pub handle: Handle,
    /// Its place among the candidates.
    pub place: usize,
    /// How.
    pub action: Action,
    /// What it frees after those before it.
    pub blocks: usize,
    /// What is computed again, or moved.
    pub tokens: usize,
    /// What that costs.
    pub cost: f64,
    /// For people.
    pub reason: String,
}

/// Who has the lowest goes first.
#[derive(Clone, Copy, Debug)]
struct Rank {
    level: i64,
    weight: f64,
    entry: Reverse<(u64, u64)>,
}

impl Rank {
    fn order(&self, other: &Self) -> Ordering {
        let weights = self.weight.partial_cmp(&other.weight).unwrap_or(Ordering::Equal);
        self.level.cmp(&other.level).then(weights).then(self.entry.cmp(&other.entry))
    }
}

impl Pager {
    /// Who should give way so that a call which needs so many blocks fits; nobody, if it fits already.
    ///
    /// # Errors
    /// `Stale`, `Value` for a candidate that does not run, or is named twice; `NeverFits`; `OutOfBlocks` if all that may
    /// go free too little; `Memory`.
    pub fn choose_victims(&self, asked: &Asked) -> Result<Vec<Victim>> {
        let candidates = self.candidates(asked)?;
        let usable = self.config.usable_blocks();
        if asked.needed > usable {
            return Err(Error::NeverFits { needed: asked.needed, usable, tier: Tier::Device });
        }
        let (free, evictable) = (self.num_free_blocks(), self.num_evictable_blocks());
        let Some(missing) = asked.needed.checked_sub(free + evictable).filter(|&missing| missing > 0) else {
            return Ok(Vec::new());
        };
        let victims = self.preempt_some(asked, &candidates, missing)?;
        let cost = victims.as_ref().map_or(f64::INFINITY, |victims| victims.iter().map(|victim| victim.cost).sum());
        if let Some(steps) = self.steps_to_wait(asked, &candidates, missing)? {
            let waiting = asked.cost.row_step * steps as f64 * asked.left_out.len() as f64;
            if victims.is_none() || waiting <= cost {
                return stalled(asked, &candidates, waiting, steps);
            }
        }
        let (needed, total, rows, tier) = (asked.needed, self.config.num_blocks, Box::default(), Tier::Device);
        victims.ok_or(Error::OutOfBlocks { needed, free, evictable, total, rows, reserve: 0, tier })
    }

    fn candidates(&self, asked: &Asked) -> Result<Vec<Seen<'_>>> {
        let mut candidates: Vec<Seen<'_>> = Vec::new();
        let Some(handles) = &asked.candidates else {
            let may_go = |sequence: &&Sequence| sequence.state == State::Running && !sequence.pinned;
            for sequence in self.sequences.iter().filter(may_go) {
                push(&mut candidates, self.seen(sequence))?;
            }
            candidates.sort_unstable_by_key(|seen| seen.sequence.serial);
            return Ok(candidates);
        };
        let mut serials = with_capacity(handles.len())?;
        for &handle in handles {
            push(&mut candidates, self.seen(self.running(handle, "choose_victims")?))?;
            serials.push(handle.serial);
        }
        serials.sort_unstable();
        match serials.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(Error::Value(format!("sequence {} is named twice in candidates", pair[0]))),
            None => Ok(candidates),
        }
    }

    /// The victims; none, if all that may go free too little.
    fn preempt_some(&self, asked: &Asked, candidates: &[Seen<'_>], missing: usize) -> Result<Option<Vec<Victim>>> {
        let mut order = with_capacity(candidates.len())?;
        for (place, &seen) in candidates.iter().enumerate() {
            order.push((self.rank(asked, seen, place)?, place));
        }
        order.sort_unstable_by(|(one, _), (other, _)| one.order(other));
        order.truncate(candidates.len().saturating_sub(asked.keep));

        let (mut all, mut freed, mut taken) = (Release::default(), 0, 0);
        while taken < order.len() && freed < missing {
            freed += all.add(self, candidates[order[taken].1])?;
            taken += 1;
        }
        if freed < missing {
            return Ok(None);
        }
        let (mut victims, mut release) = (with_capacity(taken)?, Release::default());
        let mut host_room = self.host_room();
        for &(_, place) in &order[..taken] {
            let seen = candidates[place];
            if !all.frees(self, seen) {
                continue;
            }
            let blocks = release.add(self, seen)?;
            let tokens = release.tokens(self, seen);
            let (action, cost) = self.way_back(asked.cost, seen, tokens, host_room);
            if action == Action::Swap {
                host_room -= seen.num_committed.div_ceil(self.config.block_size);
            }
            let reason = reason(asked, seen, action, blocks);
            victims.push(Victim { handle: handle_of(seen), place, action, blocks, tokens, cost, reason });
        }
        Ok(Some(victims))
    }

    fn rank(&self, asked: &Asked, seen: Seen<'_>, place: usize) -> Result<Rank> {
        let mut rank =
            Rank { level: level(asked, seen).cast_signed(), weight: 0.0, entry: Reverse(seen.sequence.entry()) };
        match asked.policy {
            VictimPolicy::Newest => {}
            VictimPolicy::Priority => rank.level += asked.priorities.get(place).copied().unwrap_or(0),
            VictimPolicy::Cheapest | VictimPolicy::LeastProgress => {
                let mut alone = Release::default();
                let blocks = alone.add(self, seen)?;
                let tokens = alone.tokens(self, seen);
                rank.weight = if asked.policy == VictimPolicy::LeastProgress {
                    tokens as f64
                } else if blocks == 0 {
                    f64::INFINITY
                } else {
                    self.way_back(asked.cost, seen, tokens, self.host_room()).1 / blocks as f64
                };
            }
        }
        Ok(rank)
    }

    /// The cheaper way to bring a sequence back, and what it costs.
    fn way_back(&self, cost: RecoveryCost, seen: Seen<'_>, tokens: usize, host_room: usize) -> (Action, f64) {
        if tokens == 0 {
            return (Action::Recompute, 0.0);
        }
        let (end, block_size) = (seen.num_committed, self.config.block_size);
        let start = end - tokens;
        let below = |position: usize| position as u64 * (position as u64 + 1) / 2;
        let pairs = (below(end) - below(start)) as f64;
        let again = cost.token * tokens as f64 + cost.pair * pairs + cost.cached_token * start as f64;
        let again = again.max(cost.least);
        let out = end.div_ceil(block_size);
        let moving = cost.block * (out + out - start / block_size) as f64;
        if out <= host_room && moving <= again && self.can_leave(seen.sequence) {
            return (Action::Swap, moving);
        }
        (Action::Recompute, again)
    }

    /// Would a swap-out find what it reads in place?
    fn can_leave(&self, sequence: &Sequence) -> bool {
        let is_target = |&block: &_| self.copies.is_target(block);
        let is_filled = !self.copies.has_targets() || !sequence.table.iter().any(is_target);
        self.copies.is_empty() && is_filled && !self.is_named(sequence)
    }

    fn host_room(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.room())
    }

    /// Steps until enough of those who go on have ended; none, if that is not known.
    fn steps_to_wait(&self, asked: &Asked, candidates: &[Seen<'_>], missing: usize) -> Result<Option<u64>> {
        if asked.left_out.is_empty() {
            return Ok(None);
        }
        let mut ends = with_capacity(asked.finishing.len())?;
        for (place, end) in asked.finishing.iter().enumerate() {
            ends.extend(end.filter(|_| !asked.left_out.contains(&place)).map(|end| (end, place)));
        }
        ends.sort_unstable();
        let (mut release, mut freed) = (Release::default(), 0);
        for (end, place) in ends {
            freed += release.add(self, candidates[place])?;
            if freed >= missing {
                return Ok(Some(end));
            }
        }
        Ok(None)
    }
}

fn handle_of(seen: Seen<'_>) -> Handle {
    Handle { slot: seen.sequence.slot, serial: seen.sequence.serial }
}

fn level(asked: &Asked, seen: Seen<'_>) -> u64 {
    u64::from(seen.sequence.num_preemptions) / asked.spare_after
}

fn reason(asked: &Asked, seen: Seen<'_>, action: Action, blocks: usize) -> String {
    let spared = match (level(asked, seen), seen.sequence.num_preemptions) {
        (0, _) => String::new(),
        (_, times) => format!(", though it was preempted {times} times"),
    };
    let moved = if action == Action::Swap { ", to the host for less than computing it again" } else { "" };
    let (name, picked) = (asked.policy.name(), asked.policy.picked());
    format!("{name}: it {picked}{spared}; frees {blocks} blocks{moved}")
}

/// Those that are left out wait.
fn stalled(asked: &Asked, candidates: &[Seen<'_>], cost: f64, steps: u64) -> Result<Vec<Victim>> {
    let mut victims = with_capacity(asked.left_out.len())?;
    let cost = cost / asked.left_out.len() as f64;
    victims.extend(asked.left_out.iter().map(|&place| Victim {
        handle: handle_of(candidates[place]),
        place,
        action: Action::Stall,
        blocks: 0,
        tokens: 0,
        cost,
        reason: format!("enough others end in {steps} steps"),
    }));
    Ok(victims)
}
