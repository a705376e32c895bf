//! Who may not be passed over any more.
//!
//! A caller may go on to the next request when one does not fit. Each admission passes over those who asked before and
//! still wait. Who was passed over too often keeps those behind it out, until it comes in or is asked about no more:
//! once somebody who waits has been asked about twice and it has not been in between, its caller has given it up.

/// A request that waits, and has come back to ask again.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    ticket: u64,
    passed_over: u32,
    asked: u64,
}

/// All that wait, in the order in which they first asked.
#[derive(Clone, Debug)]
pub struct Turns {
    waiters: Vec<Waiter>,
    patience: u32,
    next_ticket: u64,
    asked: u64,
}

impl Turns {
    /// Nobody waits. One is passed over `patience` times at most.
    #[must_use]
    pub const fn new(patience: u32) -> Self {
        Self { waiters: Vec::new(), patience, next_ticket: 0, asked: 0 }
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
        let mut before = 0;
        if let Some(ticket) = ticket {
            match self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket) {
                Ok(at) => before = std::mem::replace(&mut self.waiters[at].asked, self.asked),
                Err(at) => self.waiters.insert(at, Waiter { ticket, passed_over: 0, asked: self.asked }),
            }
        }
        // A caller asks about each request once before it asks about one again. One who never comes back with his
        // ticket tells nothing of that, so there is a limit in calls, too.
        let stale = self.asked.saturating_sub(1024.max(8 * self.waiters.len() as u64));
        let oldest = before.max(stale);
        self.waiters.retain(|waiter| waiter.asked >= oldest || waiter.passed_over < self.patience);
        let ahead = self.ahead_of(ticket);
        !self.waiters[..ahead].iter().any(|waiter| waiter.passed_over >= self.patience)
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
        let stale = self.asked.saturating_sub(1024.max(8 * self.waiters.len() as u64));
        self.waiters.retain(|waiter| waiter.asked >= stale);
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
        assert!(!turns.ask(Some(there)), "perhaps it is only not its turn yet");
        assert!(turns.ask(Some(there)), "asked twice, and the other not in between");
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
