//! Random histories: calls as plain data, drawn with weights that are themselves drawn for each run, and carried out by any pager.

use std::collections::BTreeMap;

use kvpager_core::evict::Departure;
use kvpager_core::ids::{BlockId, CONTENT_START, Handle, TOKEN_END, Token};
use kvpager_core::preemptions::Why;
use kvpager_core::sequence::State;
use kvpager_core::{Config, Error, Pager, PolicyKind, Result};

use super::naive::Naive;
use super::{A, B, Rng, config};

/// One call. Sequences are named by their serial numbers.
#[derive(Clone, Debug)]
pub enum Call {
    Admit { tokens: Vec<Token>, namespace: &'static [u8], pinned: bool },
    Peek { tokens: Vec<Token>, namespace: &'static [u8] },
    Append(u64, Token),
    Extend(u64, Vec<Token>),
    Slots(u64, usize, usize),
    Commit(u64, Option<usize>),
    Fork(u64, usize),
    Truncate(u64, usize),
    Preempt(u64),
    Resume(u64),
    Release(u64, Departure),
    Drop(u64),
    TakeCopies,
    Reset(Option<Vec<u8>>),
    Forget(Vec<Token>, &'static [u8]),
}

/// What a call answers.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    Done,
    Started(Vec<u64>),
    Peeked(usize, bool),
    Slots(Vec<i64>),
    Copies(Vec<(BlockId, BlockId)>),
    Forgotten(usize),
    Refused(Error),
}

impl Answer {
    pub const fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(_))
    }
}

/// Errors are compared with their numbers, but for the wording of two kinds.
fn answer(result: Result<Answer>) -> Answer {
    match result {
        Ok(answer) => answer,
        Err(Error::Value(_)) => Answer::Refused(Error::Value(String::new())),
        Err(Error::Config(_)) => Answer::Refused(Error::Config(String::new())),
        Err(error) => Answer::Refused(error),
    }
}

/// A pager, and the handles that it has given out, those of released sequences included.
#[derive(Debug)]
pub struct Driver {
    pub pager: Pager,
    pub handles: BTreeMap<u64, Handle>,
}

impl Driver {
    pub fn new(pager: Pager) -> Self {
        Self { pager, handles: BTreeMap::new() }
    }

    fn started(&mut self, handles: Vec<Handle>) -> Answer {
        let serials = handles.iter().map(|handle| handle.serial).collect();
        self.handles.extend(handles.into_iter().map(|handle| (handle.serial, handle)));
        Answer::Started(serials)
    }

    pub fn apply(&mut self, call: &Call) -> Answer {
        let handle = |serial: &u64| self.handles[serial];
        let pager = &mut self.pager;
        let result = match call {
            Call::Admit { tokens, namespace, pinned } => {
                pager.admit(tokens, namespace, *pinned).map(|handle| self.started(vec![handle]))
            }
            Call::Peek { tokens, namespace } => pager.find_prefix(tokens, namespace).and_then(|found| {
                pager.can_admit(tokens, namespace).map(|can_admit| Answer::Peeked(found.num_tokens, can_admit))
            }),
            Call::Append(serial, token) => pager.append(handle(serial), *token).map(|slot| Answer::Slots(vec![slot])),
            Call::Extend(serial, tokens) => pager.extend(handle(serial), tokens).map(Answer::Slots),
            Call::Slots(serial, start, stop) => pager.slots(handle(serial), *start, *stop).map(Answer::Slots),
            Call::Commit(serial, end) => pager.commit(handle(serial), *end).map(|()| Answer::Done),
            Call::Fork(serial, count) => pager.fork(handle(serial), *count).map(|handles| self.started(handles)),
            Call::Truncate(serial, len) => pager.truncate(handle(serial), *len).map(|()| Answer::Done),
            Call::Preempt(serial) => pager.preempt(handle(serial), Why::default()).map(|()| Answer::Done),
            Call::Resume(serial) => pager.resume(handle(serial)).map(|()| Answer::Done),
            Call::Release(serial, departure) => {
                pager.release(handle(serial), *departure);
                Ok(Answer::Done)
            }
            Call::Drop(serial) => {
                pager.release_dropped(handle(serial));
                Ok(Answer::Done)
            }
            Call::TakeCopies => {
                pager.take_copies().map(|pairs| Answer::Copies(pairs.into_iter().map(Into::into).collect()))
            }
            Call::Reset(identity) => pager.reset(identity.clone()).map(|()| Answer::Done),
            Call::Forget(tokens, namespace) => pager.forget(tokens, namespace).map(Answer::Forgotten),
        };
        answer(result)
    }

    /// A live sequence's tokens.
    pub fn tokens(&self, serial: u64) -> Option<Vec<Token>> {
        let sequence = self.pager.sequence(*self.handles.get(&serial)?, "tokens").ok()?;
        let mut tokens = Vec::with_capacity(sequence.len);
        self.pager.copy_tokens(sequence, &mut tokens);
        Some(tokens)
    }
}

impl Naive {
    pub fn apply(&mut self, call: &Call) -> Answer {
        answer(match call {
            Call::Admit { tokens, namespace, pinned } => {
                self.admit(tokens, namespace, *pinned).map(|serial| Answer::Started(vec![serial]))
            }
            Call::Peek { tokens, namespace } => {
                self.peek(tokens, namespace).map(|(hit, can_admit)| Answer::Peeked(hit, can_admit))
            }
            Call::Append(serial, token) => self.extend(*serial, &[*token], "append").map(Answer::Slots),
            Call::Extend(serial, tokens) => self.extend(*serial, tokens, "extend").map(Answer::Slots),
            Call::Slots(serial, start, stop) => self.slots(*serial, *start, *stop).map(Answer::Slots),
            Call::Commit(serial, end) => self.commit(*serial, *end).map(|()| Answer::Done),
            Call::Fork(serial, count) => self.fork(*serial, *count).map(Answer::Started),
            Call::Truncate(serial, len) => self.truncate(*serial, *len).map(|()| Answer::Done),
            Call::Preempt(serial) => self.preempt(*serial).map(|()| Answer::Done),
            Call::Resume(serial) => self.resume(*serial).map(|()| Answer::Done),
            Call::Release(serial, departure) => {
                self.release(*serial, *departure);
                Ok(Answer::Done)
            }
            Call::Drop(serial) => {
                self.release_dropped(*serial);
                Ok(Answer::Done)
            }
            Call::TakeCopies => Ok(Answer::Copies(self.take_copies())),
            Call::Reset(identity) => self.reset(identity.as_deref()).map(|()| Answer::Done),
            Call::Forget(tokens, namespace) => self.forget(tokens, namespace).map(Answer::Forgotten),
        })
    }
}

/// Settings drawn from a seed.
pub fn draw_config(rng: &mut Rng) -> Config {
    let block_size = if rng.once_in(24) { rng.choose(&[512, 1024]) } else { rng.choose(&[1, 2, 2, 3, 4, 4, 8]) };
    Config {
        policy: rng.choose(&[PolicyKind::Lru, PolicyKind::Slru]),
        watermark: rng.choose(&[0.0, 0.0, 0.0, 0.1, 0.3, 1.0]),
        seed: rng.next(),
        null_block: rng.once_in(4),
        prefix_cache: !rng.once_in(12),
        ..config(2 + rng.below(40), block_size)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Admit,
    Peek,
    Append,
    Extend,
    Slots,
    Commit,
    Fork,
    Truncate,
    Preempt,
    Resume,
    Release,
    Drop,
    TakeCopies,
    Forget,
    Reset,
}

/// The weights that each kind of call may get. Calls that end things are rarer, or nothing would ever grow.
const WEIGHTS: [(Kind, &[usize]); 15] = [
    (Kind::Admit, &[6, 16]),
    (Kind::Peek, &[0, 1, 3]),
    (Kind::Append, &[0, 1, 6, 20]),
    (Kind::Extend, &[0, 1, 6, 12]),
    (Kind::Slots, &[0, 1, 6]),
    (Kind::Commit, &[4, 16]),
    (Kind::Fork, &[0, 1, 4, 10]),
    (Kind::Truncate, &[0, 1, 6]),
    (Kind::Preempt, &[0, 1, 3]),
    (Kind::Resume, &[0, 2, 6]),
    (Kind::Release, &[2, 5, 10]),
    (Kind::Drop, &[0, 1, 3]),
    (Kind::TakeCopies, &[0, 1, 4]),
    (Kind::Forget, &[0, 0, 1, 3]),
    (Kind::Reset, &[0, 0, 1]),
];

/// Draws calls. Which kinds are frequent, how many tokens there are, and how long prompts grow is drawn once, so that runs differ.
#[derive(Debug)]
pub struct Story {
    rng: Rng,
    weights: [(Kind, usize); 15],
    num_tokens: usize,
    has_content: bool,
    blocks_max: usize,
    block_size: usize,
    /// Token lists to come back to.
    known: Vec<Vec<Token>>,
}

impl Story {
    pub fn new(mut rng: Rng, config: &Config) -> Self {
        let most = rng.choose(&[3, 8, 20]);
        Self {
            weights: WEIGHTS.map(|(kind, weights)| (kind, rng.choose(weights))),
            num_tokens: 1 + rng.below(4),
            has_content: rng.once_in(4),
            blocks_max: 1 + rng.below(config.num_blocks.min(most)),
            block_size: config.block_size,
            known: Vec::new(),
            rng,
        }
    }

    fn token(&mut self) -> Token {
        let start = if self.has_content && self.rng.once_in(2) { CONTENT_START } else { 0 };
        start + self.rng.below(self.num_tokens) as Token
    }

    /// Tokens; large blocks have the same one throughout, mostly.
    fn tokens(&mut self, len: usize) -> Vec<Token> {
        let stretch = if self.block_size > 16 { self.block_size } else { 1 };
        let mut tokens = Vec::with_capacity(len);
        while tokens.len() < len {
            let (token, end) = (self.token(), tokens.len() + stretch);
            tokens.resize(end.min(len), token);
        }
        if len > 0 && self.rng.once_in(60) {
            let at = self.rng.below(len);
            tokens[at] = TOKEN_END + self.rng.below(2) as Token;
        }
        tokens
    }

    fn prompt(&mut self) -> Vec<Token> {
        let len = (1 + self.rng.below(self.blocks_max * self.block_size + 1)) * usize::from(!self.rng.once_in(60));
        if self.known.is_empty() || self.rng.once_in(3) {
            return self.tokens(len);
        }
        let nth = self.rng.below(self.known.len());
        let mut prompt = self.known[nth].clone();
        if !self.rng.once_in(3) {
            prompt.truncate(self.rng.below(prompt.len() + 1));
        }
        let more = self.rng.below(2 * self.block_size + 1);
        let more = self.tokens(more);
        prompt.extend(more);
        prompt
    }

    fn remember(&mut self, tokens: Vec<Token>) {
        if self.known.len() < 12 {
            self.known.push(tokens);
        } else {
            let nth = self.rng.below(12);
            self.known[nth] = tokens;
        }
    }

    /// The next call. Sequences are mostly live ones, in the state that the call needs, but not always.
    pub fn next(&mut self, driver: &Driver) -> Call {
        let kind = self.kind();
        let wanted = if kind == Kind::Resume { State::Preempted } else { State::Running };
        match self.sequence(driver, wanted) {
            Some(serial) => self.call(kind, serial, driver),
            None => self.admit(),
        }
    }

    fn admit(&mut self) -> Call {
        let tokens = self.prompt();
        self.remember(tokens.clone());
        Call::Admit { tokens, namespace: self.rng.choose(&[A, A, A, B]), pinned: self.rng.once_in(8) }
    }

    fn call(&mut self, kind: Kind, serial: u64, driver: &Driver) -> Call {
        let (len, committed) = driver
            .pager
            .sequence(driver.handles[&serial], "next")
            .map_or((1, 0), |sequence| (sequence.len, sequence.num_committed));
        let few = self.rng.below(2 * self.block_size + 1);
        match kind {
            Kind::Admit => self.admit(),
            Kind::Peek => Call::Peek { tokens: self.prompt(), namespace: self.rng.choose(&[A, A, A, B]) },
            Kind::Append => Call::Append(serial, self.tokens(1)[0]),
            Kind::Extend => Call::Extend(serial, self.tokens(few)),
            Kind::Slots => {
                let start = (committed + self.rng.below(len - committed + 1)).saturating_sub(self.odd());
                Call::Slots(serial, start, start + self.rng.below(len + 1 - start.min(len)) + self.odd())
            }
            Kind::Commit if self.rng.once_in(2) => Call::Commit(serial, None),
            Kind::Commit => Call::Commit(serial, Some(self.rng.below(len + 1) + self.odd())),
            Kind::Fork => Call::Fork(serial, if self.rng.once_in(25) { 0 } else { 1 + self.rng.below(2) }),
            Kind::Truncate => {
                // As often by a few tokens (rejected drafts) as to anywhere.
                let least = if self.rng.once_in(2) { len.saturating_sub(few + 1) } else { 0 };
                let kept = least + 1 + self.rng.below(len - least);
                Call::Truncate(serial, (kept + self.odd()).saturating_sub(kept * self.odd()))
            }
            Kind::Preempt => Call::Preempt(serial),
            Kind::Resume => Call::Resume(serial),
            Kind::Release => {
                self.remember(driver.tokens(serial).unwrap_or_default());
                Call::Release(serial, self.rng.choose(&[Departure::Finished, Departure::Aborted]))
            }
            Kind::Drop => Call::Drop(serial),
            Kind::TakeCopies => Call::TakeCopies,
            Kind::Forget => {
                // A whole number of blocks, mostly, of a sequence or of something that was one.
                let own = driver.tokens(serial).filter(|_| self.rng.once_in(2));
                let mut tokens = own.unwrap_or_else(|| self.prompt());
                let blocks = self.rng.below(tokens.len() / self.block_size + 1).max(1);
                tokens.truncate(blocks * self.block_size + self.odd());
                Call::Forget(tokens, self.rng.choose(&[A, A, A, B]))
            }
            Kind::Reset => Call::Reset(match self.rng.below(8) {
                0 => Some(vec![0; (1 << 16) + 1]),
                1 => Some(b"other".to_vec()),
                _ => None,
            }),
        }
    }

    /// Seldom 1, else 0: what makes an argument bad.
    fn odd(&mut self) -> usize {
        usize::from(self.rng.once_in(25))
    }

    fn kind(&mut self) -> Kind {
        let mut left = self.rng.below(self.weights.iter().map(|&(_, weight)| weight).sum());
        for (kind, weight) in self.weights {
            if left < weight {
                return kind;
            }
            left -= weight;
        }
        Kind::Admit
    }

    /// A sequence in the state that a call needs, or now and then any that there ever was.
    fn sequence(&mut self, driver: &Driver, wanted: State) -> Option<u64> {
        let is_any = self.rng.once_in(30);
        let is_wanted = |handle: &Handle| {
            is_any || driver.pager.sequence(*handle, "next").is_ok_and(|sequence| sequence.state == wanted)
        };
        let fit: Vec<u64> =
            driver.handles.values().filter(|handle| is_wanted(handle)).map(|handle| handle.serial).collect();
        if fit.is_empty() { None } else { Some(self.rng.choose(&fit)) }
    }
}
