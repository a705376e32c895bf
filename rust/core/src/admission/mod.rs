//! Load control: who may come in now, so that those who run do not run out of blocks later.
//!
//! No pool is known here: `pager::control` says what runs, and this decides. `survival` estimates how long answers get,
//! `projection` adds up what all will hold, `turns` sees to it that nobody waits for ever.
//!
//! One number sets it, the *risk* that is taken of running out. At 1 nothing is projected, and a request comes in if it
//! fits now, behind the watermark. At 0 nobody is counted on to end: each keeps room for all that it may get. Between
//! them less is risked of running out soon than late. Whoever came in with p tokens and loses his blocks after h steps has
//! gained h, and computes p + h again: the risk of that is taken h / (p + h) times.

pub mod projection;
pub mod survival;
pub mod turns;

use crate::error::{Error, Result};
use projection::{Member, Projection};
use survival::{BINS, Censored, Ended, Survival, bin, edge, prior, seen};
use turns::Turns;

/// Kinds of requests, at most.
pub const KINDS_MAX: usize = 64;
/// A kind is believed to be like all others as firmly as if so many of its own had said so.
const POOL_WEIGHT: f64 = 8.0;
/// What is assumed at first counts as much as one that was seen.
const PRIOR_WEIGHT: f64 = 1.0;

/// How much is risked, and what is assumed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// The probability of running out, 0 to 1, that is still taken; less of doing so soon.
    pub risk: f64,
    /// Half of all answers are assumed to be longer, before any has ended.
    pub prior_tokens: u32,
    /// So many ended answers are remembered, about.
    pub memory: u32,
    /// A request is passed over so often at most.
    pub patience: u32,
}

/// Limits of the settings, in words.
pub const RISK_LIMITS: &str = "0 to 1";
/// Limits of `prior_tokens`, in words.
pub const PRIOR_LIMITS: &str = "1 to 1048575";
/// Limits of `memory`, in words.
pub const MEMORY_LIMITS: &str = "1 to 1000000";
/// Limits of `patience`, in words.
pub const PATIENCE_LIMITS: &str = "0 to 4294967295";

/// What is said of a request's life.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Life {
    /// Its kind, as a number.
    pub kind: u16,
    /// Sequences that it will be when its prompt is computed: it is forked then.
    pub samples: u16,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens of its answer, at most.
    pub most: Option<u32>,
    /// Tokens of its answer, as far as is known.
    pub expected: Option<u32>,
}

impl Life {
    /// The sequence as the projection sees it: so many tokens, in a table of so many blocks, of which others hold some.
    #[must_use]
    pub fn member(&self, tokens: u32, blocks: u32, shared: u32, block_size: u32) -> Member {
        let answered = tokens.saturating_sub(self.prompt);
        let most = self.most.map(|most| most.saturating_sub(answered));
        let expected = self.expected.filter(|&expected| expected > answered).map(|expected| expected - answered);
        let left = match (most, expected) {
            (Some(most), Some(expected)) => Some(most.min(expected)),
            (most, expected) => expected.or(most),
        };
        Member {
            kind: self.kind as usize,
            answered,
            blocks: blocks.saturating_sub(shared),
            room: (u64::from(blocks) * u64::from(block_size)).saturating_sub(u64::from(tokens)) as u32,
            left,
            is_certain: expected.is_some(),
        }
    }

    /// Those that it has yet to be forked into, as many like this one: they share all of the prompt but its last block, where
    /// that is not full. Who has a part of its answer was forked before.
    #[must_use]
    pub fn forks(&self, answered: u32, block_size: u32) -> (usize, Member) {
        let count = if answered == 0 { self.samples.saturating_sub(1) } else { 0 };
        let (blocks, shared) = (self.prompt.div_ceil(block_size), self.prompt / block_size);
        (usize::from(count), self.member(self.prompt, blocks, shared, block_size))
    }

    /// Blocks that it holds in the end with all that it is forked into, if answers get as long as they may; the last token
    /// of each needs none. An expectation is no limit any more once the answer is longer.
    #[must_use]
    pub fn most_blocks(&self, answered: u32, block_size: u32) -> Option<usize> {
        let most = self.most.or(self.expected.filter(|&expected| expected >= answered))?;
        let each = (self.prompt as usize + most as usize).saturating_sub(1).max(1).div_ceil(block_size as usize);
        Some(each + self.forks(answered, block_size).0 * (each - (self.prompt / block_size) as usize))
    }
}

/// Why a request has to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Its blocks are not there now.
    Blocks,
    /// Those who run are expected to need them.
    Growth,
    /// Others were passed over too often.
    Turn,
}

impl Reason {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Growth => "growth",
            Self::Turn => "turn",
        }
    }
}

/// It waits: so many blocks would be needed, of so many that there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// Why.
    pub reason: Reason,
    /// Blocks that it takes; of "growth", that all will hold.
    pub needed: usize,
    /// Blocks that are free or cached; of "growth", that there are at all.
    pub available: usize,
    /// Its number in the order of those who wait.
    pub ticket: u64,
    /// How often others came in before it.
    pub passed_over: u32,
}

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict<T> {
    /// It is in.
    In(T),
    /// Not now.
    Wait(Wait),
    /// It is larger than the pool.
    Never {
        /// Blocks of the request.
        needed: usize,
        /// Blocks that sequences can ever hold.
        usable: usize,
    },
}

/// What the controller knows beside the pool.
#[derive(Debug)]
pub struct Control {
    settings: Settings,
    margins: Margins,
    prior: Vec<f64>,
    kinds: Vec<Box<str>>,
    /// By kind.
    ended: Vec<Ended>,
    /// Of all kinds.
    pool: Ended,
    /// Who waits.
    pub turns: Turns,
    /// Names this controller among those that the pager had.
    pub generation: u64,
}

impl Control {
    /// A controller that has seen nothing.
    ///
    /// # Errors
    /// `Config` for a setting outside its limits.
    pub fn new(settings: Settings) -> Result<Self> {
        let fail = |message: String| Err(Error::Config(message));
        if !(0.0..=1.0).contains(&settings.risk) {
            return fail(format!("risk is {}; it must be {RISK_LIMITS}", settings.risk));
        }
        if !(1..survival::AGE_END).contains(&settings.prior_tokens) {
            return fail(format!("prior_tokens is {}; it must be {PRIOR_LIMITS}", settings.prior_tokens));
        }
        if !(1..=1_000_000).contains(&settings.memory) {
            return fail(format!("memory is {}; it must be {MEMORY_LIMITS}", settings.memory));
        }
        let pool = Ended::new(f64::from(settings.memory));
        Ok(Self {
            margins: Margins::new(settings.risk),
            prior: prior(settings.prior_tokens),
            kinds: vec!["".into()],
            ended: vec![pool.clone()],
            pool,
            turns: Turns::new(settings.patience),
            generation: 0,
            settings,
        })
    }

    /// The settings.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The number of a kind, if it was named before.
    #[must_use]
    pub fn find_kind(&self, name: &str) -> Option<u32> {
        self.kinds.iter().position(|kind| **kind == *name).map(|kind| kind as u32)
    }

    /// Kinds that were named.
    #[must_use]
    pub fn num_kinds(&self) -> usize {
        self.kinds.len()
    }

    /// The number of a kind.
    ///
    /// # Errors
    /// `Value` if there are too many.
    pub fn kind(&mut self, name: &str) -> Result<u32> {
        if let Some(kind) = self.find_kind(name) {
            return Ok(kind);
        }
        if self.kinds.len() == KINDS_MAX {
            let message = format!("kind {name:?} would be one more than {KINDS_MAX}: name kinds of requests, not each");
            return Err(Error::Value(message));
        }
        self.kinds.push(name.into());
        self.ended.push(Ended::new(f64::from(self.settings.memory)));
        Ok(self.kinds.len() as u32 - 1)
    }

    /// An answer of so many tokens came to its end, or was cut off.
    pub fn end(&mut self, kind: u32, tokens: u32, is_finished: bool) {
        let Some(ended) = self.ended.get_mut(kind as usize) else { return };
        if is_finished {
            ended.finish(tokens);
            self.pool.finish(tokens);
        } else {
            ended.abort(tokens);
            self.pool.abort(tokens);
        }
    }

    /// How long answers get, by kind. `alive`: kind and tokens of each whose end is not known.
    #[must_use]
    pub fn survivals(&self, alive: impl Iterator<Item = (usize, u32)>) -> Vec<Survival> {
        let is_one = self.kinds.len() == 1;
        let mut running = vec![Censored::default(); if is_one { 0 } else { self.kinds.len() }];
        let mut all = Censored::default();
        for (kind, tokens) in alive {
            let seen = seen(tokens);
            all.add_seen(seen);
            if let Some(running) = running.get_mut(kind) {
                running.add_seen(seen);
            }
        }
        let pool = self.pool.hazards(&all, &self.prior, PRIOR_WEIGHT);
        if is_one {
            return vec![Survival::new(&pool)];
        }
        let kinds = self.ended.iter().zip(&running);
        kinds.map(|(ended, running)| Survival::new(&ended.hazards(running, &pool, POOL_WEIGHT))).collect()
    }

    /// Blocks that all will hold with one more, at the risk that is taken.
    #[must_use]
    pub fn most_with(&self, projection: &Projection, one: &Member, survivals: &[Survival]) -> usize {
        let most = projection.most_with(one, &survivals[one.kind.min(survivals.len() - 1)], &self.margins);
        // A float as large as this is no number of blocks; the cast keeps it in range.
        #[expect(clippy::cast_sign_loss, reason = "blocks")]
        let most = most.max(0.0).ceil() as usize;
        most
    }
}

/// How many standard deviations are kept free.
#[derive(Clone, Debug)]
pub struct Margins {
    /// By the bin of 16 times what is computed again for a token that was gained.
    deviations: Vec<f64>,
}

impl Margins {
    /// Of a risk that is taken where nothing but what was gained is computed again.
    #[must_use]
    pub fn new(risk: f64) -> Self {
        let price = |bin| f64::from((edge(bin) + edge(bin + 1)).max(32)) / 32.0;
        Self { deviations: (0..BINS).map(|bin| deviations(risk / price(bin))).collect() }
    }

    /// After some steps, of one that came in with so many tokens that it would compute again.
    #[must_use]
    pub fn after(&self, steps: u32, tokens: u32) -> f64 {
        let gained = u64::from(steps.max(1));
        let price = 16 * (gained + u64::from(tokens)) / gained;
        self.deviations[bin(price.try_into().unwrap_or(u32::MAX))]
    }
}

/// How many standard deviations above the mean leave this probability. By rational functions only: every machine
/// computes the same (I11).
fn deviations(risk: f64) -> f64 {
    /// Abramowitz and Stegun 26.2.19.
    fn above(x: f64) -> f64 {
        const D: [f64; 6] =
            [0.049_867_347_0, 0.021_141_006_1, 0.003_277_626_3, 0.000_038_003_6, 0.000_048_890_6, 0.000_005_383_0];
        let sum = D.iter().rev().fold(0.0, |sum, d| (sum + d) * x) + 1.0;
        let fourth = (sum * sum) * (sum * sum);
        0.5 / ((fourth * fourth) * (fourth * fourth))
    }
    let (tail, sign) = if risk <= 0.5 { (risk, 1.0) } else { (1.0 - risk, -1.0) };
    let (mut low, mut high) = (0.0, 40.0);
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        (low, high) = if above(middle) > tail { (middle, high) } else { (low, middle) };
    }
    sign * low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_those_of_the_normal_distribution() {
        for (risk, expected) in
            [(0.5, 0.0), (0.158_655_3, 1.0), (0.05, 1.644_854), (0.01, 2.326_348), (0.95, -1.644_854)]
        {
            assert!((deviations(risk) - expected).abs() < 1e-4, "{risk}: {}", deviations(risk));
        }
    }

    #[test]
    fn less_is_risked_of_a_loss_that_gains_little() {
        let margins = Margins::new(0.25);
        for (steps, tokens, risk) in [(9, 0, 0.25), (512, 512, 0.125), (100, 300, 0.0625), (1, 999, 0.000_25)] {
            let (ours, expected) = (margins.after(steps, tokens), deviations(risk));
            assert!((ours - expected).abs() < 0.04, "{steps} {tokens}: {ours} {expected}");
        }
        assert_eq!(margins.after(0, 7).to_bits(), margins.after(1, 7).to_bits(), "now is no later than the next step");
        assert!(margins.after(1, u32::MAX) >= margins.after(1, 1 << 16));
    }
}
