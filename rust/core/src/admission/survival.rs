//! How long answers get: a survival estimate from those that ended and those that still run.
//!
//! Short answers end first, so the lengths of those that ended are too short a picture. Who runs says something, too:
//! his answer is longer than what he has. Kaplan and Meier's estimate uses both: of those known to have got as far as t
//! tokens, which share ended there? The product of what remains is the share of answers longer than t.
//!
//! Ages fall into bins, one token wide below 16 and a sixteenth of an octave above, so that the tables are small and
//! short answers are told apart as well as long ones. Within a bin of several tokens whoever left or runs counts for the
//! part that was seen of him. What ended long ago counts less and less.

/// Answers of so many tokens and more are taken for one token less.
pub const AGE_END: u32 = 1 << 20;
/// Bins of ages.
pub const BINS: usize = 16 * 17;

/// The bin of an age.
#[must_use]
pub const fn bin(age: u32) -> usize {
    let age = if age < AGE_END { age } else { AGE_END - 1 };
    let octave = octave(age);
    16 * octave + (age >> octave) as usize
}

/// An age's bin is two to the power of this wide.
const fn octave(age: u32) -> usize {
    (age | 16).ilog2() as usize - 4
}

/// The first age of a bin; of `BINS`, the end of all.
#[must_use]
pub const fn edge(bin: usize) -> u32 {
    if bin < 16 {
        return bin as u32;
    }
    (16 + (bin as u32) % 16) << (bin / 16 - 1)
}

/// The bin of one who has so many tokens, and how much of that was seen of him.
#[must_use]
pub fn seen(tokens: u32) -> (usize, f64) {
    let tokens = tokens.min(AGE_END - 1);
    let octave = octave(tokens);
    (bin(tokens), f64::from((tokens & ((1 << octave) - 1)) + 1) * INVERSE[octave])
}

/// Those who got so far and were not seen to end, by bin.
#[derive(Clone, Debug)]
pub struct Censored {
    /// How many.
    count: Vec<f64>,
    /// How much of the bin was seen of them, as a sum of shares.
    part: Vec<f64>,
}

impl Default for Censored {
    fn default() -> Self {
        Self { count: vec![0.0; BINS], part: vec![0.0; BINS] }
    }
}

impl Censored {
    /// One who has so many tokens, and did not end.
    pub fn add(&mut self, tokens: u32) {
        self.add_seen(seen(tokens));
    }

    /// The same for an age of which is known where it is.
    pub fn add_seen(&mut self, (bin, part): (usize, f64)) {
        self.count[bin] += 1.0;
        self.part[bin] += part;
    }

    fn decay(&mut self, factor: f64) {
        self.count.iter_mut().chain(&mut self.part).for_each(|value| *value *= factor);
    }
}

/// Answers of one kind that are over.
#[derive(Clone, Debug)]
pub struct Ended {
    finished: Vec<f64>,
    aborted: Censored,
    keep: f64,
}

impl Ended {
    /// None yet. With each that ends, those before count `1 / memory` less.
    #[must_use]
    pub fn new(memory: f64) -> Self {
        Self { finished: vec![0.0; BINS], aborted: Censored::default(), keep: 1.0 - 1.0 / memory }
    }

    /// An answer came to its end.
    pub fn finish(&mut self, tokens: u32) {
        self.decay();
        self.finished[bin(tokens)] += 1.0;
    }

    /// An answer was cut off: it would have been longer.
    pub fn abort(&mut self, tokens: u32) {
        self.decay();
        self.aborted.add(tokens);
    }

    fn decay(&mut self) {
        self.finished.iter_mut().for_each(|value| *value *= self.keep);
        self.aborted.decay(self.keep);
    }

    /// Which share of those who reach a bin end in it. `prior` is what is assumed of `weight` more who reach each bin.
    #[must_use]
    pub fn hazards(&self, running: &Censored, prior: &[f64], weight: f64) -> Vec<f64> {
        let mut beyond = 0.0;
        let mut hazards = vec![0.0; BINS];
        for bin in (0..BINS).rev() {
            let at_risk = beyond + self.finished[bin] + self.aborted.part[bin] + running.part[bin];
            beyond += self.finished[bin] + self.aborted.count[bin] + running.count[bin];
            let total = at_risk + weight;
            hazards[bin] =
                if total > 0.0 { ((self.finished[bin] + weight * prior[bin]) / total).min(1.0) } else { prior[bin] };
        }
        hazards
    }
}

/// What is assumed as long as nothing was seen: nobody ends before 0.7 times `median` tokens, and from there on the share of
/// those who go on falls with the square of the length. So half end by `median`, and who has got far gets farther.
#[must_use]
pub fn prior(median: u32) -> Vec<f64> {
    let start = f64::from(median) * std::f64::consts::FRAC_1_SQRT_2;
    let longer = |tokens: u32| {
        let share = start / f64::from(tokens).max(start);
        share * share
    };
    let mut hazards: Vec<f64> = (0..BINS).map(|bin| 1.0 - longer(edge(bin + 1)) / longer(edge(bin))).collect();
    hazards[BINS - 1] = 1.0;
    hazards
}

/// The share of answers that have so many tokens or more.
#[derive(Clone, Debug)]
pub struct Survival {
    /// At the start of each bin, and what the next one has more.
    at: Vec<(f64, f64)>,
}

impl Survival {
    /// From the shares that end in each bin.
    #[must_use]
    pub fn new(hazards: &[f64]) -> Self {
        let mut next = 1.0;
        let at = hazards.iter().map(|hazard| {
            let share = next;
            next = share * (1.0 - hazard);
            (share, next - share)
        });
        Self { at: at.collect() }
    }

    /// The share that has `tokens` or more; on a straight line within a bin.
    #[must_use]
    pub fn share(&self, tokens: u32) -> f64 {
        if tokens >= AGE_END {
            return 0.0;
        }
        let (bin, octave) = (bin(tokens), octave(tokens));
        let within = f64::from(tokens & ((1 << octave) - 1)) * INVERSE[octave];
        let (share, more) = self.at[bin];
        share + more * within
    }

    /// Tokens that those who have `answered` of them and no end yet still get, on average: the sum over t of the share that
    /// gets t more. On straight lines within the bins.
    #[must_use]
    pub fn mean_left(&self, answered: u32) -> f64 {
        let next = answered.saturating_add(1).min(AGE_END);
        let (mut from, mut at_from) = (next, self.share(next));
        if at_from <= 0.0 {
            return f64::from(AGE_END - next);
        }
        let now = at_from;
        let mut sum = 0.0;
        for bin in bin(next)..BINS {
            let (share, more) = self.at[bin];
            let (end, at_end) = (edge(bin + 1), share + more);
            sum += 0.5 * (f64::from(end - from) * (at_from + at_end) + (at_from - at_end));
            (from, at_from) = (end, at_end);
        }
        sum / now
    }

    /// Of those who have `answered` tokens and no end yet, the share that is not at its end after some steps more.
    #[must_use]
    pub fn from(&self, answered: u32) -> Rest<'_> {
        let next = answered.saturating_add(1);
        let now = self.share(next);
        Rest { survival: self, next, scale: if now > 0.0 { 1.0 / now } else { 0.0 } }
    }
}

/// What survival is for those who have got so far.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'a> {
    survival: &'a Survival,
    next: u32,
    scale: f64,
}

impl Rest<'_> {
    /// The share that is not at its end after `steps` more.
    #[must_use]
    pub fn goes_on(&self, steps: u32) -> f64 {
        // Where nobody has got so far, this one may go on for ever.
        if self.scale > 0.0 { self.survival.share(self.next.saturating_add(steps)) * self.scale } else { 1.0 }
    }
}

/// One by the width of a bin, by octave above the first.
const INVERSE: [f64; 17] = {
    let mut inverse = [1.0; 17];
    let mut octave = 1;
    while octave < 17 {
        inverse[octave] = inverse[octave - 1] / 2.0;
        octave += 1;
    }
    inverse
};

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: [f64; BINS] = [0.0; BINS];

    #[test]
    fn bins_follow_each_other_without_gaps() {
        for at in 0..BINS {
            assert!(edge(at) < edge(at + 1));
            assert_eq!([bin(edge(at)), bin(edge(at + 1) - 1)], [at, at]);
        }
        assert_eq!((edge(BINS), bin(AGE_END), bin(u32::MAX)), (AGE_END, BINS - 1, BINS - 1));
    }

    /// Kaplan and Meier's own example, in months: 0.8, 3.1, 5.4 and 9.2 end; 1.0, 2.7, 7.0 and 12.1 are lost. The
    /// product over the ends is 7/8, 7/8 * 4/5, ... * 3/4... in order.
    #[test]
    fn it_is_the_product_limit_estimate() {
        let mut ended = Ended::new(f64::INFINITY);
        for tokens in [2, 6, 9, 12] {
            ended.finish(tokens);
        }
        for tokens in [3, 5] {
            ended.abort(tokens);
        }
        let mut running = Censored::default();
        for tokens in [10, 15] {
            running.add(tokens);
        }
        let survival = Survival::new(&ended.hazards(&running, &NOBODY, 0.0));
        // At 2 eight are at risk; at 6, without the one that ended and the two lost, five; at 9 four; at 12 two.
        let expected = [(2, 1.0), (3, 7.0 / 8.0), (6, 7.0 / 8.0), (7, 7.0 / 8.0 * 4.0 / 5.0)];
        for (tokens, share) in expected {
            assert!((survival.share(tokens) - share).abs() < 1e-12, "{tokens}");
        }
        assert!((survival.share(10) - 0.875 * 0.8 * 0.75).abs() < 1e-12);
        assert!((survival.share(13) - 0.875 * 0.8 * 0.75 * 0.5).abs() < 1e-12);
        assert!((survival.from(6).goes_on(3) - 0.75).abs() < 1e-12, "six tokens and no end: seven at least");
    }

    #[test]
    fn what_is_left_is_the_mean_of_what_ended_later() {
        let mut ended = Ended::new(f64::INFINITY);
        let lengths = [1, 3, 3, 9, 15];
        for tokens in lengths {
            ended.finish(tokens);
        }
        let survival = Survival::new(&ended.hazards(&Censored::default(), &NOBODY, 0.0));
        for answered in 0..15 {
            let left: Vec<u32> = lengths.iter().filter(|&&all| all > answered).map(|all| all - answered).collect();
            let mean = f64::from(left.iter().sum::<u32>()) / left.iter().map(|_| 1.0).sum::<f64>();
            assert!((survival.mean_left(answered) - mean).abs() < 1e-9, "{answered}");
        }
        // Nobody got so far: no end is in sight.
        assert!(survival.mean_left(15) > 1e6 - 100.0 && survival.mean_left(u32::MAX) >= 0.0);
        // Uniform on 100 to 199: half of what is left of the range.
        let mut ended = Ended::new(f64::INFINITY);
        (100..200).for_each(|tokens| ended.finish(tokens));
        let survival = Survival::new(&ended.hazards(&Censored::default(), &NOBODY, 0.0));
        for (answered, left) in [(0, 149.5), (99, 50.5), (149, 25.5)] {
            assert!((survival.mean_left(answered) - left).abs() < 1.0, "{answered}: {}", survival.mean_left(answered));
        }
    }

    #[test]
    fn who_runs_on_makes_the_estimate_longer() {
        let mut ended = Ended::new(f64::INFINITY);
        (0..10).for_each(|_| ended.finish(8));
        let mut running = Censored::default();
        assert!(Survival::new(&ended.hazards(&running, &NOBODY, 0.0)).share(9) < 1e-12);
        (0..30).for_each(|_| running.add(12));
        assert!((Survival::new(&ended.hazards(&running, &NOBODY, 0.0)).share(9) - 0.75).abs() < 1e-12);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let mut ended = Ended::new(10.0);
        (0..100).for_each(|_| ended.finish(4));
        (0..100).for_each(|_| ended.finish(40));
        let survival = Survival::new(&ended.hazards(&Censored::default(), &NOBODY, 0.0));
        assert!(survival.share(20) > 0.999);
    }

    #[test]
    fn the_prior_has_its_median() {
        for median in [1, 64, 1024, 100_000] {
            let survival = Survival::new(&prior(median));
            assert!((survival.share(median) - 0.5).abs() < 0.04, "{median}: {}", survival.share(median));
        }
    }
}
