//! Transfers over random histories, with bytes: after every call the checker is silent, and what a running sequence can see is what was
//! computed for its tokens, whatever was released, evicted, failed or abandoned meanwhile (W1-W4, L3, L4, L12, I9).
//!
//! A slot's content is a hash of everything that its KV depends on. Destinations are poisoned when a plan is made, while it runs, and after it
//! was abandoned: who reads one of them too early, or is handed one that a mover may still write, sees rubbish.

mod support;

use std::collections::BTreeMap;

use kvpager_core::check::check;
use kvpager_core::digest::{Digest, Records};
use kvpager_core::dump::dump;
use kvpager_core::evict::Departure;
use kvpager_core::ids::{CONTENT_START, Handle, Token};
use kvpager_core::pager::{Admitted, End, Wish};
use kvpager_core::preemptions::Why;
use kvpager_core::sequence::State;
use kvpager_core::transfers::{Plan, PlanId, PlanState, Tier};
use kvpager_core::{Config, Error, Pager, PolicyKind};
use support::{A, B, Rng, config, seeds};

const POISON: u64 = u64::MAX;

/// A sequence of the story, and the number of the reset before its admission.
struct Actor {
    handle: Handle,
    namespace: &'static [u8],
    epoch: u64,
}

struct Story {
    rng: Rng,
    pager: Pager,
    actors: Vec<Actor>,
    prompts: Vec<Vec<Token>>,
    plans: Vec<PlanId>,
    ended: Vec<PlanId>,
    memory: [Vec<Vec<u64>>; 2],
    /// Metas and contents by key. It loses records now and then.
    store: BTreeMap<Digest, (Vec<u8>, Vec<u64>)>,
    /// Saves that the store does not listen to any more.
    unwanted: Vec<PlanId>,
    epoch: u64,
    tally: BTreeMap<&'static str, usize>,
}

/// What the KV of the last of these tokens depends on.
fn content(epoch: u64, namespace: &[u8], tokens: &[Token]) -> u64 {
    let words = std::iter::once(epoch).chain(namespace.iter().map(|&byte| u64::from(byte)));
    words.chain(tokens.iter().map(|&token| u64::from(token))).fold(14_695_981_039_346_656_037, |hash, word| {
        let mut mixed = Rng(hash ^ word);
        mixed.next()
    })
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let block_size = rng.choose(&[1, 2, 4]);
        let num_blocks = 6 + rng.below(16);
        let config = Config {
            policy: rng.choose(&[PolicyKind::Lru, PolicyKind::Slru]),
            null_block: rng.once_in(4),
            watermark: rng.choose(&[0.0, 0.0, 0.2]),
            num_host_blocks: 1 + rng.below(60),
            ..config(num_blocks, block_size)
        };
        let memory = [num_blocks, config.num_host_blocks].map(|blocks| vec![vec![0; block_size]; blocks]);
        let pager = Pager::new(config).unwrap();
        let (actors, prompts, plans, ended, tally) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
        let (store, unwanted) = (BTreeMap::new(), Vec::new());
        Self { rng, pager, actors, prompts, plans, ended, memory, store, unwanted, epoch: 0, tally }
    }

    fn block_size(&self) -> usize {
        self.pager.config().block_size
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_insert(0) += 1;
    }

    /// Few different tokens and many common starts, now and then with a run that stands for an image.
    fn prompt(&mut self) -> Vec<Token> {
        if self.prompts.len() > 3 && !self.rng.once_in(3) {
            let nth = self.rng.below(self.prompts.len());
            return self.prompts[nth].clone();
        }
        let prompt = self.new_prompt();
        self.prompts.push(prompt.clone());
        prompt
    }

    fn new_prompt(&mut self) -> Vec<Token> {
        let len = 1 + self.rng.below(8 * self.block_size());
        let style = self.rng.below(4) as Token;
        let image = self.rng.once_in(4).then(|| self.rng.below(len)..len);
        (0..len)
            .map(|at| match &image {
                Some(image) if image.contains(&at) => CONTENT_START + self.rng.below(2) as Token,
                _ if self.rng.once_in(12) => 7,
                _ => style,
            })
            .collect()
    }

    fn tokens(&self, handle: Handle) -> Vec<Token> {
        let sequence = self.pager.sequence(handle, "test").unwrap();
        let mut tokens = Vec::new();
        self.pager.copy_tokens(sequence, &mut tokens);
        tokens
    }

    fn copy_queued(&mut self) {
        for [source, target] in self.pager.take_copies().unwrap() {
            let content = self.memory[0][source as usize].clone();
            self.memory[0][target as usize] = content;
        }
    }

    /// Computes positions `start..stop` of a sequence, which are written where its table says.
    fn compute(&mut self, nth: usize, stop: usize) {
        let (handle, epoch, namespace) = (self.actors[nth].handle, self.actors[nth].epoch, self.actors[nth].namespace);
        let start = self.pager.running(handle, "test").unwrap().num_committed;
        let Ok(slots) = self.pager.slots(handle, start, stop) else { return };
        self.copy_queued();
        let tokens = self.tokens(handle);
        for (slot, position) in slots.into_iter().zip(start..stop) {
            let slot = usize::try_from(slot).unwrap();
            let (block, offset) = (slot / self.block_size(), slot % self.block_size());
            self.memory[0][block][offset] = content(epoch, namespace, &tokens[..=position]);
        }
        self.pager.commit(handle, Some(stop)).unwrap();
    }

    /// What every sequence can see is what it, or somebody with the same tokens, has computed.
    fn look(&self) {
        for actor in &self.actors {
            let sequence = self.pager.sequence(actor.handle, "test").unwrap();
            if !matches!(sequence.state, State::Running | State::Fetching | State::SwappingOut) {
                continue;
            }
            let tokens = self.tokens(actor.handle);
            for position in 0..sequence.num_committed {
                let block = sequence.table[position / self.block_size()] as usize;
                let seen = self.memory[0][block][position % self.block_size()];
                let expected = content(actor.epoch, actor.namespace, &tokens[..=position]);
                assert_eq!(seen, expected, "sequence {} at position {position} sees other KV", sequence.serial);
            }
        }
    }

    fn poison(&mut self, plan: PlanId) {
        let Some(plan) = self.pager.find_plan(plan).unwrap() else { return };
        if plan.work.target() == Tier::Store {
            return;
        }
        let memory = &mut self.memory[plan.work.target() as usize];
        for &target in &plan.targets {
            memory[target as usize].fill(POISON);
        }
    }

    fn made(&mut self, what: &'static str, plan: PlanId) {
        self.count(what);
        self.poison(plan);
        self.plans.push(plan);
    }

    /// What a plan between the host and the store can do now: a save gives what `done` names, a load gets what is there.
    fn exchange(&mut self, id: PlanId, done: &dyn Fn(usize) -> bool) -> Option<Vec<bool>> {
        let Plan { sources, targets, work, .. } = self.pager.find_plan(id).unwrap().unwrap();
        let Records { keys, metas } = work.records()?.clone();
        let metas: Vec<Vec<u8>> = metas.chunks(metas.len() / keys.len()).map(<[u8]>::to_vec).collect();
        let mut arrived = vec![false; keys.len()];
        for (nth, key) in keys.into_iter().enumerate().filter(|&(nth, _)| done(nth)) {
            if work.target() == Tier::Host {
                if let Some((meta, content)) = self.store.get(&key) {
                    assert_eq!(*meta, metas[nth], "no two digests are equal");
                    self.memory[1][targets[nth] as usize].clone_from(content);
                    arrived[nth] = true;
                }
            } else if !self.unwanted.contains(&id) {
                let content = self.memory[1][sources[nth] as usize].clone();
                self.store.insert(key, (metas[nth].clone(), content));
                arrived[nth] = true;
            }
        }
        Some(arrived)
    }

    /// The store drops all, or a record and what is below it; and nothing that is on its way there arrives.
    fn drop_stored(&mut self, top: Option<&Digest>) {
        let Some(top) = top else {
            self.store.clear();
            return self.unwanted.extend(&self.plans);
        };
        let mut dead = vec![*top];
        while let Some(key) = dead.pop() {
            self.store.remove(&key);
            dead.extend(self.store.iter().filter(|(_, (meta, _))| meta.starts_with(&key)).map(|(key, _)| *key));
        }
        self.unwanted.extend(&self.plans);
    }

    /// The bytes of a plan's blocks that `done` names arrive.
    fn copy(&mut self, plan: PlanId, done: &dyn Fn(usize) -> bool) {
        let Plan { sources, targets, work, .. } = self.pager.find_plan(plan).unwrap().unwrap();
        let pairs: Vec<(u32, u32)> = sources.iter().copied().zip(targets.iter().copied()).collect();
        let (from, to) = (work.source() as usize, work.target() as usize);
        for (nth, (source, target)) in pairs.into_iter().enumerate() {
            self.memory[to][target as usize] =
                if done(nth) { self.memory[from][source as usize].clone() } else { vec![POISON; self.block_size()] };
        }
    }

    fn pick(&mut self, state: State) -> Option<usize> {
        let of_state = |actor: &Actor| self.pager.sequence(actor.handle, "test").unwrap().state == state;
        let fitting: Vec<usize> = (0..self.actors.len()).filter(|&nth| of_state(&self.actors[nth])).collect();
        (!fitting.is_empty()).then(|| fitting[self.rng.below(fitting.len())])
    }

    fn admit(&mut self) {
        let (tokens, namespace) = (self.prompt(), if self.rng.once_in(4) { B } else { A });
        let fetches = self.tally.get("fetch").copied();
        self.admit_prompt(&tokens, namespace);
        if self.tally.get("fetch").copied() > fetches {
            // Others often want the same.
            self.admit_prompt(&tokens, namespace);
        }
    }

    fn admit_prompt(&mut self, tokens: &[Token], namespace: &'static [u8]) {
        let fetch = (!self.rng.once_in(4)).then(|| 1 + self.rng.below(2 * self.block_size()));
        let wish = Wish { pinned: self.rng.once_in(8), wait: false, fetch };
        match self.pager.admit_as(tokens, namespace, wish) {
            Ok(Admitted::Sequence(handle)) => {
                self.actors.push(Actor { handle, namespace, epoch: self.epoch });
                let sequence = self.pager.sequence(handle, "test").unwrap();
                if let Some(plan) = sequence.plan {
                    if self.plans.contains(&plan) {
                        self.count("join");
                    } else {
                        self.made("fetch", plan);
                    }
                }
            }
            Ok(Admitted::Computing(_)) => unreachable!(),
            Err(error) => assert!(matches!(error, Error::OutOfBlocks { .. } | Error::NeverFits { .. }), "{error}"),
        }
    }

    fn end(&mut self) {
        if self.plans.is_empty() {
            return;
        }
        let plan = self.plans[self.rng.below(self.plans.len())];
        let Some(found) = self.pager.find_plan(plan).unwrap() else {
            self.plans.retain(|&other| other != plan);
            self.ended.push(plan);
            return;
        };
        let (state, blocks, has_store) = (found.state, found.targets.len(), found.work.records().is_some());
        match (state, self.rng.below(8)) {
            (PlanState::Planned, 0) => {
                self.count("cancel");
                assert!(self.pager.end_plan(plan, End::Cancelled).unwrap());
            }
            (PlanState::Planned, _) => assert!(self.pager.start_plan(plan, None).unwrap()),
            (PlanState::Started(_), 0 | 3..) if has_store => {
                let is_hasty = self.rng.once_in(4);
                let asked: Vec<bool> = (0..blocks).map(|_| !is_hasty || !self.rng.once_in(3)).collect();
                let done = self.exchange(plan, &|nth| asked[nth]).unwrap();
                let is_complete = done.iter().all(|&done| done);
                self.count(if is_complete { "stored" } else { "missed" });
                let end = if is_complete { End::Complete } else { End::Failed(Some(&done)) };
                assert!(self.pager.end_plan(plan, end).unwrap());
            }
            (PlanState::Started(_), 0) => {
                self.count("fail");
                let done: Vec<bool> = (0..blocks).map(|_| !self.rng.once_in(3)).collect();
                self.copy(plan, &|nth| done[nth]);
                assert!(self.pager.end_plan(plan, End::Failed(Some(&done))).unwrap());
            }
            (PlanState::Started(_), 1) => {
                self.count("abandon");
                assert!(self.pager.abandon_plan(plan).unwrap());
            }
            (PlanState::Started(_) | PlanState::Abandoned(_), 2) if has_store => {
                self.poison(plan);
                self.exchange(plan, &|nth| nth % 2 == 0);
            }
            (PlanState::Started(_), 2) => self.poison(plan),
            (PlanState::Started(_), _) => {
                self.count("complete");
                self.copy(plan, &|_| true);
                assert!(self.pager.end_plan(plan, End::Complete).unwrap());
            }
            (PlanState::Abandoned(_), 0) => {
                self.count("reclaim");
                assert!(self.pager.reclaim_plan(plan).unwrap());
            }
            (PlanState::Abandoned(_), _) => self.poison(plan),
        }
    }

    fn call(&mut self) {
        match self.rng.below(35) {
            0..=4 => self.admit(),
            5..=7 => {
                if let Some(nth) = self.pick(State::Running) {
                    let sequence = self.pager.running(self.actors[nth].handle, "test").unwrap();
                    let (committed, len) = (sequence.num_committed, sequence.len);
                    let rest = len - committed;
                    let stop = committed + if self.rng.once_in(3) { self.rng.below(rest + 1) } else { rest };
                    self.compute(nth, stop);
                }
            }
            8 => {
                if let Some(nth) = self.pick(State::Running) {
                    let token = self.rng.below(3) as Token;
                    let _ = self.pager.append(self.actors[nth].handle, token);
                    self.copy_queued();
                }
            }
            9 => {
                if let Some(nth) = self.pick(State::Running) {
                    let Actor { handle, namespace, epoch } = self.actors[nth];
                    let children = self.pager.fork(handle, 1 + self.rng.below(2)).unwrap();
                    self.actors.extend(children.into_iter().map(|handle| Actor { handle, namespace, epoch }));
                }
            }
            10 => {
                if let Some(nth) = self.pick(State::Running) {
                    let handle = self.actors[nth].handle;
                    let len = self.pager.running(handle, "test").unwrap().len;
                    self.pager.truncate(handle, 1 + self.rng.below(len)).unwrap();
                }
            }
            11..=14 => {
                if !self.actors.is_empty() {
                    let nth = self.rng.below(self.actors.len());
                    let actor = self.actors.swap_remove(nth);
                    let state = self.pager.sequence(actor.handle, "test").unwrap().state;
                    self.count(state.name());
                    self.pager.release(actor.handle, Departure::Finished);
                }
            }
            15 if self.rng.once_in(2) => {
                if let Some(nth) = self.pick(State::Running) {
                    self.pager.preempt(self.actors[nth].handle, Why::default()).unwrap();
                }
            }
            15 => {
                let state = self.rng.choose(&[State::Preempted, State::Swapped]);
                if let Some(nth) = self.pick(state)
                    && self.pager.resume(self.actors[nth].handle).is_ok()
                {
                    self.count("resume");
                    self.actors[nth].epoch = self.epoch;
                }
            }
            16 | 17 => {
                let most = 1 + self.rng.below(6);
                if let Some(plan) = self.pager.offload(most).unwrap() {
                    self.made("offload", plan);
                }
            }
            18 => {
                if let Some(nth) = self.pick(State::Running)
                    && let Some(plan) = self.pager.offload_committed(self.actors[nth].handle).unwrap()
                {
                    self.made("offload_committed", plan);
                }
            }
            19 => {
                if self.rng.once_in(2)
                    && let Some(nth) = self.pick(State::Running)
                    && let Ok(plan) = self.pager.swap_out(self.actors[nth].handle, Why::default())
                {
                    self.made("swap_out", plan);
                }
            }
            20 => {
                if let Some(nth) = self.pick(State::Swapped)
                    && let Ok(plan) = self.pager.swap_in(self.actors[nth].handle)
                {
                    self.made("swap_in", plan);
                }
            }
            21..=24 | 30..=33 => self.end(),
            25..=29 => self.store_call(),
            _ => self.rare(),
        }
    }

    fn store_call(&mut self) {
        match self.rng.below(5) {
            0 | 1 => {
                let most = 1 + self.rng.below(6);
                if let Some(plan) = self.pager.save(most).unwrap() {
                    self.made("save", plan);
                }
            }
            2 | 3 => {
                let (tokens, namespace) = (self.prompt(), if self.rng.once_in(4) { B } else { A });
                let records = self.pager.store_keys(&tokens, namespace).unwrap();
                let there = records.keys.iter().take_while(|key| self.store.contains_key(*key)).count();
                // Others often want the same.
                for _ in 0..2 {
                    let plan = self.pager.load(&tokens, namespace, there * self.block_size()).unwrap();
                    match plan {
                        Some(plan) if self.plans.contains(&plan) => self.count("shared load"),
                        Some(plan) => self.made("load", plan),
                        None => {}
                    }
                }
            }
            _ => {
                let nth = self.rng.below(self.store.len() + 1);
                let lost = self.store.keys().nth(nth).copied();
                lost.and_then(|key| self.store.remove(&key));
            }
        }
    }

    fn rare(&mut self) {
        match self.rng.below(7) {
            6 => {
                self.count("restart");
                self.pager = Pager::new(self.pager.config().clone()).unwrap();
                (self.actors, self.plans) = (Vec::new(), Vec::new());
                (self.ended, self.unwanted) = (Vec::new(), Vec::new());
            }
            0 if self.rng.once_in(3) => {
                self.pager.reset(None).unwrap();
                self.drop_stored(None);
                self.epoch += 1;
            }
            1 | 2 => {
                let mut tokens = self.prompt();
                tokens.truncate(tokens.len() / self.block_size() * self.block_size());
                if !tokens.is_empty() {
                    self.pager.forget(&tokens, A).unwrap();
                    let records = self.pager.store_keys(&tokens, A).unwrap();
                    if records.keys.len() * self.block_size() == tokens.len() {
                        self.drop_stored(records.keys.last());
                    } else {
                        // A run that goes on behind the tokens has no keys yet.
                        self.drop_stored(None);
                    }
                }
            }
            _ => {
                if let Some(&plan) = self.ended.last() {
                    let before = dump(&self.pager, true).unwrap();
                    assert!(!self.pager.end_plan(plan, End::Complete).unwrap());
                    assert!(!self.pager.start_plan(plan, Some(3)).unwrap());
                    assert_eq!(dump(&self.pager, true).unwrap(), before, "L4: a late report changes nothing");
                }
            }
        }
    }

    fn drain(&mut self) {
        for actor in std::mem::take(&mut self.actors) {
            self.pager.release(actor.handle, Departure::Aborted);
        }
        for plan in std::mem::take(&mut self.plans) {
            let Some(found) = self.pager.find_plan(plan).unwrap() else { continue };
            match found.state {
                PlanState::Planned => self.pager.end_plan(plan, End::Cancelled),
                PlanState::Started(_) => self.pager.end_plan(plan, End::Failed(None)),
                PlanState::Abandoned(_) => self.pager.reclaim_plan(plan),
            }
            .unwrap();
        }
        let stats = self.pager.stats();
        assert_eq!(stats.free_blocks + stats.cached_blocks + stats.reserved_blocks, stats.total_blocks, "L12: device");
        assert_eq!(stats.host.free_blocks + stats.host.cached_blocks, stats.host.total_blocks, "L12: host");
    }
}

#[test]
fn no_history_of_transfers_shows_a_wrong_byte_or_loses_a_block() {
    let mut tally = BTreeMap::new();
    for seed in seeds(1, 120) {
        let mut story = Story::new(seed);
        for nth in 0..400 {
            let before = dump(&story.pager, true).unwrap();
            story.call();
            let violations = check(&story.pager).unwrap();
            assert!(
                violations.is_empty(),
                "KVPAGER_SEED={seed}, call {nth}: {violations:#?}\nbefore:\n{before}\nafter:\n{}",
                dump(&story.pager, true).unwrap()
            );
            story.look();
        }
        story.drain();
        assert_eq!(check(&story.pager).unwrap(), [] as [String; 0], "KVPAGER_SEED={seed}, at the end");
        for (what, times) in story.tally {
            *tally.entry(what).or_insert(0) += times;
        }
    }
    println!("{tally:?}");
    for what in [
        "fetch",
        "join",
        "offload",
        "offload_committed",
        "swap_out",
        "swap_in",
        "resume",
        "cancel",
        "fail",
        "abandon",
        "reclaim",
        "complete",
        "fetching",
        "swapping_out",
        "swapped",
        "swapping_in",
        "save",
        "load",
        "shared load",
        "stored",
        "missed",
        "restart",
    ] {
        assert!(std::env::var("KVPAGER_SEED").is_ok() || tally.contains_key(what), "no history had a {what}");
    }
}
