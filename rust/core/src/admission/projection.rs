//! What the pool will hold if nobody else is let in: growth takes, ends give back.
//!
//! After h steps a sequence of which it is not known when it ends holds its blocks and h tokens more with the probability that
//! it still runs, and nothing otherwise. Sums of many such have a mean and a variance. One of which it is known holds
//! them until then for certain. Steps are looked at on a grid, a quarter of an octave apart or less, and at each known end,
//! where what is certain is at its highest.

use super::Margins;
use super::survival::{BINS, Survival, bin};

const GRID: usize = 53;
/// Where fewer than this share of a group goes on, it is taken to be over: what it still held would be less than it has.
const OVER: f64 = 1e-4;

/// Bins of ages that count as one: an eighth of an octave, and more where kinds are many, so that groups stay few.
const fn bins_together(kinds: usize) -> usize {
    match kinds {
        0..=2 => 2,
        3..=8 => 4,
        _ => 8,
    }
}

/// The steps that are looked at. The first ones matter where many run: all grow at once, and nobody ends for a while.
const STEPS: [u32; GRID] = {
    let first = [0, 1, 2, 4, 8, 16, 32, 48];
    let mut steps = [0; GRID];
    let mut at = 0;
    while at < GRID {
        steps[at] = if at < first.len() { first[at] } else { (4 + (at as u32) % 4) << (2 + at / 4) };
        at += 1;
    }
    steps
};

/// One by the distance of each step from the one before: those are powers of two, so that this is exact.
const INVERSE: [f64; GRID] = {
    let mut inverse = [1.0; GRID];
    let mut at = 1;
    while at < GRID {
        inverse[at] = 1.0 / (STEPS[at] - STEPS[at - 1]) as f64;
        at += 1;
    }
    inverse
};

/// A sequence, as the projection sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its kind: which survival estimate is about it.
    pub kind: usize,
    /// Tokens of its answer so far.
    pub answered: u32,
    /// Blocks that its end gives back.
    pub blocks: u32,
    /// Tokens that fit into its blocks before it needs another one.
    pub room: u32,
    /// Tokens that it still gets, at most.
    pub left: Option<u32>,
    /// It gets all of those.
    pub is_certain: bool,
}

impl Member {
    /// Tokens in the blocks that its end gives back.
    fn own_tokens(&self, block_size: u32) -> f64 {
        f64::from(self.blocks) * f64::from(block_size) - f64::from(self.room)
    }

    /// What it holds, in tokens. The last block of each is half empty on average, in the steps to come.
    fn tokens(&self, block_size: u32) -> f64 {
        self.own_tokens(block_size) + 0.5 * f64::from(block_size - 1)
    }
}

/// What all hold after some steps.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Steps from now.
    pub steps: u32,
    /// Blocks, on average.
    pub mean: f64,
    /// Of the blocks, as nobody knows when lives end.
    pub variance: f64,
    /// Blocks more that those may hold whose ends are known, as their last blocks are filled differently: three standard
    /// deviations, or what it is at worst.
    pub rounding: f64,
}

/// What all hold in the steps to come.
#[derive(Clone, Debug, Default)]
pub struct Projection {
    points: Vec<Point>,
    block_size: u32,
    /// What those hold, on average, that they did not write: tokens that a victim computes again beside its own.
    prompt: u32,
}

/// Sequences of one kind and about one age: sums of one, of tokens and of their squares.
struct Group {
    kind: usize,
    answered: u64,
    sums: [f64; 3],
    /// What those take with them who come to their limit after a step of the grid; empty where nobody has one.
    leave: Vec<[f64; 3]>,
}

impl Projection {
    /// Of these sequences, beside `fixed` blocks that stay held.
    #[must_use]
    pub fn new(members: &[Member], survivals: &[Survival], block_size: u32, fixed: usize) -> Self {
        let together = bins_together(survivals.len());
        let ages = BINS.div_ceil(together);
        let mut groups: Vec<Group> = Vec::new();
        let mut group_of = vec![u32::MAX; survivals.len() * ages];
        let mut ends: Vec<(u32, f64)> = Vec::new();
        let mut prompts = 0.0;
        for member in members {
            prompts += f64::max(0.0, member.own_tokens(block_size) - f64::from(member.answered));
            let tokens = member.tokens(block_size);
            if let (true, Some(left)) = (member.is_certain, member.left) {
                ends.push((left, tokens));
                continue;
            }
            let place = &mut group_of[member.kind * ages + bin(member.answered) / together];
            if *place == u32::MAX {
                *place = groups.len() as u32;
                groups.push(Group { kind: member.kind, answered: 0, sums: [0.0; 3], leave: Vec::new() });
            }
            let group = &mut groups[*place as usize];
            group.answered += u64::from(member.answered);
            add(&mut group.sums, [1.0, tokens, tokens * tokens]);
            if let Some(left) = member.left {
                // It counts up to its last step on the grid.
                let last = STEPS.partition_point(|&steps| steps < left).max(1) - 1;
                group.leave.resize(GRID, [0.0; 3]);
                add(&mut group.leave[last], [1.0, tokens, tokens * tokens]);
            }
        }
        ends.sort_unstable_by_key(|end| end.0);
        #[expect(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "sequences, below 2^31, and tokens")]
        let prompt = (prompts / members.len().max(1) as f64) as u32;
        Self { points: join(&spread(&groups, survivals), &ends, block_size, fixed), block_size, prompt }
    }

    /// The steps that were looked at, and what all hold then.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Blocks that all will hold at most, and `one` more: the mean and the margin of standard deviations, at the worst step.
    #[must_use]
    pub fn most_with(&self, one: &Member, survival: &Survival, margins: &Margins) -> f64 {
        let mut more = share_of(one, survival, self.block_size);
        self.points.iter().fold(0.0, |most, point| {
            let (mean, variance) = more(point.steps);
            let lives = margins.after(point.steps, self.prompt) * (point.variance + variance).sqrt();
            f64::max(most, point.mean + mean + lives + point.rounding)
        })
    }

    /// One more was let in.
    pub fn add(&mut self, one: &Member, survival: &Survival) {
        let mut more = share_of(one, survival, self.block_size);
        for point in &mut self.points {
            let (mean, variance) = more(point.steps);
            point.mean += mean;
            point.variance += variance;
        }
    }
}

/// What one more adds to the mean and the variance, asked about ascending steps.
fn share_of(one: &Member, survival: &Survival, block_size: u32) -> impl FnMut(u32) -> (f64, f64) {
    let (size, tokens) = (f64::from(block_size), one.tokens(block_size));
    let (left, is_certain) = (one.left.unwrap_or(u32::MAX), one.is_certain);
    let rest = survival.from(one.answered);
    let mut before = None;
    move |steps| {
        // One whose end is known may end between two points: then it counts at the second with what it had at its end.
        let is_over = if is_certain { before.is_some_and(|before| before >= left) } else { steps >= left.max(1) };
        before = Some(steps);
        if is_over {
            return (0.0, 0.0);
        }
        let share = if is_certain { 1.0 } else { rest.goes_on(steps) };
        let blocks = (tokens + f64::from(steps.min(left))) / size;
        (share * blocks, share * (1.0 - share) * blocks * blocks)
    }
}

fn add(sums: &mut [f64; 3], more: [f64; 3]) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += more;
    }
}

/// Mean and variance of the tokens that the groups hold, on the grid.
fn spread(groups: &[Group], survivals: &[Survival]) -> [(f64, f64); GRID] {
    let mut held = [(0.0, 0.0); GRID];
    for group in groups {
        let [mut count, mut tokens, mut squares] = group.sums;
        #[expect(clippy::cast_sign_loss, reason = "a count")]
        let rest = survivals[group.kind].from((group.answered / (count as u64).max(1)) as u32);
        for (at, held) in held.iter_mut().enumerate() {
            let share = rest.goes_on(STEPS[at]);
            if share < OVER {
                break;
            }
            let steps = f64::from(STEPS[at]);
            held.0 += share * (tokens + steps * count);
            held.1 += share * (1.0 - share) * (squares + steps * (2.0 * tokens + steps * count));
            if let Some(left) = group.leave.get(at) {
                (count, tokens, squares) = (count - left[0], tokens - left[1], squares - left[2]);
            }
        }
    }
    held
}

/// The grid and the known ends together, in ascending order.
fn join(uncertain: &[(f64, f64); GRID], ends: &[(u32, f64)], block_size: u32, fixed: usize) -> Vec<Point> {
    let size = f64::from(block_size);
    #[expect(clippy::cast_precision_loss, reason = "blocks and sequences, below 2^31")]
    let (fixed, mut count) = (fixed as f64, ends.len() as f64);
    let mut held: f64 = ends.iter().map(|end| end.1).sum();
    let mut points = Vec::with_capacity(GRID + ends.len());
    let (mut at, mut over) = (0, 0);
    let mut next_end = 0;
    while at < GRID || next_end < ends.len() {
        let end = ends.get(next_end).map_or(u32::MAX, |end| end.0);
        let steps = if at < GRID { STEPS[at].min(end) } else { end };
        while over < ends.len() && ends[over].0 < steps {
            held -= ends[over].1;
            count -= 1.0;
            over += 1;
        }
        let (mean, variance) = between(uncertain, at, steps);
        let certain = if over < ends.len() { held + count * f64::from(steps) } else { 0.0 };
        let (mean, variance) = (fixed + (mean + certain) / size, variance / (size * size));
        let rounding = f64::min(3.0 * (count / 12.0).sqrt(), count * (size - 1.0) / (2.0 * size));
        points.push(Point { steps, mean, variance, rounding });
        at += usize::from(at < GRID && STEPS[at] == steps);
        // Few end together.
        while ends.get(next_end).is_some_and(|end| end.0 == steps) {
            next_end += 1;
        }
    }
    points
}

/// On a straight line between two steps of the grid; `next` is the first one that is not below `steps`.
fn between(grid: &[(f64, f64); GRID], next: usize, steps: u32) -> (f64, f64) {
    if next == 0 || next == GRID || STEPS[next] == steps {
        return grid[next.min(GRID - 1)];
    }
    let (from, to) = (grid[next - 1], grid[next]);
    let within = f64::from(steps - STEPS[next - 1]) * INVERSE[next];
    (from.0 + (to.0 - from.0) * within, from.1 + (to.1 - from.1) * within)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::survival::{Censored, Ended};

    fn survival(lengths: &[u32]) -> Survival {
        let mut ended = Ended::new(f64::INFINITY);
        for &tokens in lengths {
            ended.finish(tokens);
        }
        Survival::new(&ended.hazards(&Censored::default(), &[0.0; BINS], 0.0))
    }

    const fn member(answered: u32, blocks: u32, left: Option<u32>, is_certain: bool) -> Member {
        Member { kind: 0, answered, blocks, room: 0, left, is_certain }
    }

    /// Mean and variance of what is held after so many steps, over all ways in which the lives can end: each goes on or has
    /// ended. Blocks hold one token.
    fn enumerated(members: &[Member], survival: &Survival, steps: u32) -> (f64, f64) {
        let lives: Vec<(f64, f64)> = members
            .iter()
            .map(|member| {
                let held = f64::from(member.blocks + steps);
                match (member.is_certain, member.left) {
                    (true, left) => (f64::from(u8::from(left.is_some_and(|left| steps <= left))), held),
                    (false, Some(left)) if steps > 0 && steps >= left => (0.0, held),
                    (false, _) => (survival.from(member.answered).goes_on(steps), held),
                }
            })
            .collect();
        let (mut mean, mut square) = (0.0, 0.0);
        for who in 0_u32..1 << lives.len() {
            let (mut probability, mut sum) = (1.0, 0.0);
            for (at, &(share, held)) in lives.iter().enumerate() {
                let goes_on = who >> at & 1 == 1;
                probability *= if goes_on { share } else { 1.0 - share };
                sum += if goes_on { held } else { 0.0 };
            }
            mean += probability * sum;
            square += probability * sum * sum;
        }
        (mean, square - mean * mean)
    }

    #[test]
    fn it_is_what_the_enumeration_of_all_lives_gives() {
        let survival = survival(&[10, 20, 40, 40, 70, 130, 300, 301]);
        let members = [
            member(0, 5, None, false),
            member(9, 12, None, false),
            member(25, 40, Some(30), false),
            member(25, 17, Some(500), false),
            member(3, 9, Some(57), true),
            member(99, 3, Some(16), true),
            member(64, 64, None, false),
        ];
        for count in 0..=members.len() {
            let members = &members[..count];
            let projection = Projection::new(members, std::slice::from_ref(&survival), 1, 0);
            for point in projection.points().iter().filter(|point| STEPS.contains(&point.steps)) {
                let (mean, variance) = enumerated(members, &survival, point.steps);
                assert!((point.mean - mean).abs() < 1e-6 * (1.0 + mean), "{count} {point:?} {mean}");
                assert!((point.variance - variance).abs() < 0.6 + 1e-6 * variance, "{count} {point:?} {variance}");
            }
        }
    }

    #[test]
    fn one_more_is_as_if_it_had_been_there() {
        let survival = survival(&[10, 20, 40, 40, 70, 130, 300, 301]);
        let all = [
            member(0, 5, None, false),
            member(3, 9, Some(64), true),
            member(25, 40, Some(30), false),
            member(25, 40, Some(1), false),
            member(7, 8, Some(128), true),
        ];
        for last in 0..all.len() {
            let (mut others, one) = (all.to_vec(), all[last]);
            others.remove(last);
            let together = Projection::new(&all, std::slice::from_ref(&survival), 1, 3);
            let mut one_by_one = Projection::new(&others, std::slice::from_ref(&survival), 1, 3);
            let most = one_by_one.most_with(&one, &survival, &Margins { deviations: vec![1.0; BINS] });
            one_by_one.add(&one, &survival);
            let seen = one_by_one
                .points()
                .iter()
                .map(|point| point.mean + point.variance.sqrt() + point.rounding)
                .fold(0.0, f64::max);
            assert!((most - seen).abs() < 1e-9);
            for point in one_by_one.points() {
                let same = together.points().iter().find(|other| other.steps == point.steps).unwrap();
                assert!((same.mean - point.mean).abs() < 1e-6, "{last}: {same:?} {point:?}");
            }
        }
    }

    #[test]
    fn a_known_end_counts_to_its_last_step_and_no_further() {
        let all = [member(0, 10, Some(37), true), member(0, 20, Some(5000), true)];
        let projection = Projection::new(&all, &[], 1, 4);
        let at = |steps| projection.points().iter().find(|point| point.steps == steps).unwrap().mean;
        for (steps, blocks) in [(0, 34.0), (37, 34.0 + 74.0), (48, 24.0 + 48.0), (5000, 24.0 + 5000.0)] {
            assert!((at(steps) - blocks).abs() < 1e-9, "{steps}");
        }
        assert!((projection.points().last().unwrap().mean - 4.0).abs() < 1e-9, "all are gone");
    }

    #[test]
    fn steps_ascend_and_reach_far() {
        assert!(STEPS.windows(2).all(|pair| pair[0] < pair[1] && (pair[1] - pair[0]).is_power_of_two()));
        assert_eq!((STEPS[0], STEPS[5], STEPS[8], STEPS[12], STEPS[GRID - 1]), (0, 16, 64, 128, 131_072));
    }
}
