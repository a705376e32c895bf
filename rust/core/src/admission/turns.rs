//! Who may not be passed over any more.
//!
//! A caller may go on to the next request when one does not fit. Each admission passes over those who asked before and
//! still wait. Who was passed over too often keeps those behind it out, until it comes in or is asked about no more.
//!
//! Whether it is asked about is seen in rounds: one ends when somebody is asked about a second time in it. So a scheduler
//! that goes through its queue has one a step, and callers that each ask for themselves have those of the one who asks most
//! often. Who is not asked about for some rounds keeps nobody out, as he may have gone; his count is kept, in case he is only
//! asked about less often. Who is known to have gone is given up.

/// Rounds in which one who waits may not be asked about.
const ROUNDS: u64 = 8;
/// Those whose turns are watched, at most. Those who may have gone make room first, then the last in order: they will be
/// among them.
const WAITERS_MAX: usize = 4096;
/// Calls after which one who was not asked about is forgotten; so many times all that wait, if that is more.
const CALLS_KEPT: u64 = 16_384;
const TURNS_KEPT: u64 = 64;

/// A request that waits, and has come back to ask again.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    ticket: u64,
    passed_over: u32,
    asked: u64,
    round: u64,
}

/// All that wait, in the order in which they first asked.
#[derive(Clone, Debug)]
pub struct Turns {
    waiters: Vec<Waiter>,
    patience: u32,
    next_ticket: u64,
    asked: u64,
    round: u64,
}

impl Turns {
    /// Nobody waits. One is passed over `patience` times at most.
    #[must_use]
    pub const fn new(patience: u32) -> Self {
        Self { waiters: Vec::new(), patience, next_ticket: 0, asked: 0, round: 0 }
    }

    /// A number for one who waits for the first time.
    pub const fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    /// How often was it passed over?
    #[must_use]
    pub fn passed_over(&self, ticket: u64) -> u32 {
        self.find(ticket).map_or(0, |at| self.waiters[at].passed_over)
    }

    /// May it come in, as far as the others are concerned? `ticket` is what it got when it asked before, if it did.
    pub fn ask(&mut self, ticket: Option<u64>) -> bool {
        self.asked += 1;
        let ticket = ticket.filter(|&ticket| ticket < self.next_ticket);
        if let Some(ticket) = ticket {
            match self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket) {
                Ok(at) => {
                    let waiter = &mut self.waiters[at];
                    self.round += u64::from(waiter.round == self.round);
                    (waiter.asked, waiter.round) = (self.asked, self.round);
                }
                Err(at) => {
                    let (asked, round) = (self.asked, self.round);
                    self.waiters.insert(at, Waiter { ticket, passed_over: 0, asked, round });
                    self.shrink();
                }
            }
        }
        let ahead = self.ahead_of(ticket);
        !self.waiters[..ahead].iter().any(|waiter| waiter.passed_over >= self.patience && self.is_asked(waiter))
    }

    /// It waits no longer, and never came in. Nothing happens if nobody waits by this ticket.
    pub fn give_up(&mut self, ticket: u64) {
        if let Some(at) = self.find(ticket) {
            self.waiters.remove(at);
        }
    }

    /// It came in, past those who asked before.
    pub fn enter(&mut self, ticket: Option<u64>) {
        let ahead = self.ahead_of(ticket);
        for waiter in &mut self.waiters[..ahead] {
            waiter.passed_over = waiter.passed_over.saturating_add(1);
        }
        if let Some(at) = ticket.and_then(|ticket| self.find(ticket)) {
            self.waiters.remove(at);
        }
        // Those who asked last before the others have asked many times over have gone.
        let kept = CALLS_KEPT.max(TURNS_KEPT * self.waiters.len() as u64);
        let stale = self.asked.saturating_sub(kept);
        self.waiters.retain(|waiter| waiter.asked >= stale);
    }

    /// Is it asked about as often as others? One who never comes back with his ticket ends no round, so there is a limit in
    /// calls, too.
    fn is_asked(&self, waiter: &Waiter) -> bool {
        let calls = 1024.max(8 * self.waiters.len() as u64);
        self.asked - waiter.asked <= calls && self.round - waiter.round <= ROUNDS
    }

    fn shrink(&mut self) {
        if self.waiters.len() <= WAITERS_MAX {
            return;
        }
        let oldest = (0..self.waiters.len()).min_by_key(|&at| self.waiters[at].asked);
        match oldest.filter(|&at| !self.is_asked(&self.waiters[at])) {
            Some(at) => drop(self.waiters.remove(at)),
            None => self.waiters.truncate(WAITERS_MAX),
        }
    }

    fn ahead_of(&self, ticket: Option<u64>) -> usize {
        ticket.map_or(self.waiters.len(), |ticket| self.waiters.partition_point(|waiter| waiter.ticket < ticket))
    }

    fn find(&self, ticket: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_passed_over_more_often_than_his_patience_lasts() {
        let mut turns = Turns::new(3);
        let large = turns.ticket();
        let mut came = 0;
        for _ in 0..100 {
            assert!(turns.ask(Some(large)), "nobody is ahead of the first");
            if turns.ask(None) {
                turns.enter(None);
                came += 1;
            }
        }
        assert_eq!((came, turns.passed_over(large)), (3, 3));
        turns.enter(Some(large));
        assert!(turns.ask(None));
    }

    #[test]
    fn who_asks_no_more_keeps_nobody_out() {
        let mut turns = Turns::new(1);
        let (gone, there) = (turns.ticket(), turns.ticket());
        assert!(turns.ask(Some(gone)));
        turns.enter(None);
        for _ in 0..=ROUNDS {
            assert!(!turns.ask(Some(there)), "perhaps it is only asked about less often");
        }
        assert!(turns.ask(Some(there)));
    }

    #[test]
    fn who_is_asked_about_less_often_keeps_his_turn() {
        let mut turns = Turns::new(3);
        let large = turns.ticket();
        let mut came = 0;
        for _ in 0..100 {
            assert!(turns.ask(Some(large)));
            let small = turns.ticket();
            for _ in 0..ROUNDS {
                if turns.ask(Some(small)) {
                    turns.enter(Some(small));
                    came += 1;
                    break;
                }
            }
        }
        assert_eq!((came, turns.passed_over(large)), (3, 3));
    }

    #[test]
    fn who_is_asked_about_rarely_keeps_his_count() {
        let mut turns = Turns::new(3);
        let large = turns.ticket();
        let mut came = [0; 10];
        for came in &mut came {
            assert!(turns.ask(Some(large)), "nobody is ahead of the first");
            // A small one that is asked about until it comes in, one after the other, for 20 rounds.
            let mut small = turns.ticket();
            for _ in 0..20 {
                if turns.ask(Some(small)) {
                    turns.enter(Some(small));
                    small = turns.ticket();
                    *came += 1;
                }
            }
        }
        assert_eq!(turns.passed_over(large), came.iter().sum::<u32>());
        assert!(came[0] > 3, "he may have gone");
        assert!(
            came[1..].iter().all(|&came| came <= 20 - ROUNDS as u32),
            "{came:?}: he is there, and has waited enough"
        );
    }

    #[test]
    fn who_is_given_up_keeps_nobody_out() {
        let mut turns = Turns::new(1);
        let (gone, there) = (turns.ticket(), turns.ticket());
        assert!(turns.ask(Some(gone)));
        turns.enter(None);
        assert!(!turns.ask(Some(there)));
        for _ in 0..2 {
            turns.give_up(gone);
            assert!(turns.ask(Some(there)));
        }
        turns.give_up(12345);
        assert_eq!((turns.passed_over(gone), turns.waiters.len()), (0, 1));
        assert!(turns.ask(Some(gone)), "he may change his mind: behind nobody, and not passed over yet");
        assert!(turns.ask(Some(there)));
    }

    #[test]
    fn those_who_may_have_gone_make_room_for_those_who_wait() {
        let mut turns = Turns::new(1);
        let first = turns.ticket();
        turns.ask(Some(first));
        turns.enter(None);
        for _ in 0..WAITERS_MAX {
            let ticket = turns.ticket();
            turns.ask(Some(ticket));
            turns.ask(None);
        }
        assert_eq!((turns.waiters.len(), turns.passed_over(first)), (WAITERS_MAX, 1), "the last in order makes room");
        for _ in 0..8 * WAITERS_MAX {
            turns.ask(Some(first));
        }
        let last = turns.ticket();
        turns.ask(Some(last));
        assert!(turns.find(last).is_some() && turns.waiters.len() == WAITERS_MAX);
        assert_eq!(turns.passed_over(first), 1);
    }

    #[test]
    fn those_who_come_back_once_and_never_again_take_bounded_room() {
        let mut turns = Turns::new(1);
        for _ in 0..3 * WAITERS_MAX {
            turns.ask(None);
            let ticket = turns.ticket();
            turns.ask(Some(ticket));
        }
        assert_eq!(turns.waiters.len(), WAITERS_MAX);
        turns.enter(None);
        assert!((0..20 * WAITERS_MAX).any(|_| turns.ask(None)));
    }

    #[test]
    fn callers_without_tickets_are_not_kept_out_for_ever() {
        let mut turns = Turns::new(1);
        let gone = turns.ticket();
        turns.ask(Some(gone));
        turns.enter(None);
        assert!(!turns.ask(None));
        assert!((0..2000).any(|_| turns.ask(None)));
    }

    #[test]
    fn those_behind_are_not_passed_over() {
        let mut turns = Turns::new(1);
        let (first, second) = (turns.ticket(), turns.ticket());
        turns.ask(Some(first));
        turns.ask(Some(second));
        turns.enter(Some(first));
        assert_eq!(turns.passed_over(second), 0);
        assert_eq!(turns.passed_over(12345), 0);
        assert!(turns.ask(Some(12345)), "a ticket that nobody gave is none");
    }
}
