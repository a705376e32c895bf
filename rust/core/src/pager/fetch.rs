//! Fetch: an admission whose prefix goes on on the host takes its blocks, and a plan brings them. Others that want the
//! same join. `docs/design/rules.md` 16.4.
//!
//! The blocks stay the sequences' own until they have arrived, and are then published like those of any commit. So the
//! device's index never names a block whose bytes are still moving (I9), and a failed fetch leaves behind a sequence
//! that has to compute more, nothing else.

use super::Pager;
use super::admit::{Admission, Supply, check_tokens};
use super::computing::Admitted;
use super::life::Known;
use super::plans::End;
use crate::content;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::ids::{BlockId, Handle, NodeId, Token};
use crate::index::Found;
use crate::memory::{self, with_capacity};
use crate::preemptions::Why;
use crate::sequence::{Sequence, State};
use crate::transfers::{Member, Members, Plan, PlanId, Work};

/// What can be fetched for a prompt.
enum Source {
    /// These blocks of the host, up to here.
    Host(Found),
    /// What a plan brings already, up to this block of the path.
    Plan(PlanId, usize),
}

/// How a prompt is to be admitted.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// It only holds a prefix.
    pub pinned: bool,
    /// Rather wait than compute what another sequence is about to have computed.
    pub wait: bool,
    /// Fetch from the host, if it is so many tokens at least.
    pub fetch: Option<usize>,
}

impl Pager {
    /// Admits a prompt as wished: rather waits, where a running sequence is about to compute more of it than is cached;
    /// rather fetches, where the host has more of it. (`admit` is the usual wish.)
    ///
    /// # Errors
    /// As `admit`.
    pub fn admit_as(&mut self, tokens: &[Token], namespace: &[u8], wish: Wish) -> Result<Admitted> {
        let plan = self.plan(tokens, namespace);
        let found = match &plan {
            Ok(admission) => admission.found,
            Err(Error::OutOfBlocks { .. }) => self.find(tokens, namespace),
            Err(_) => return Err(self.counted(plan).err().unwrap_or(Error::EmptyPrompt)),
        };
        if wish.wait
            && let Some(computing) = found.and_then(|found| self.computing_behind(found, tokens))
        {
            check_tokens(tokens, 0)?;
            return Ok(Admitted::Computing(computing));
        }
        let source = wish.fetch.and_then(|least| self.find_source(tokens, namespace, found, least));
        let handle = match source {
            None => {
                let admission = self.counted(plan)?;
                self.begin(tokens, namespace, wish.pinned, &admission)?
            }
            Some(Source::Plan(id, end)) => self.admit_to_plan(tokens, namespace, wish.pinned, found, id, end)?,
            Some(Source::Host(on_host)) => self.admit_from_host(tokens, namespace, wish.pinned, found, on_host)?,
        };
        Ok(Admitted::Sequence(handle))
    }

    /// So many tokens behind the device's prefix a fetch would bring from the host.
    #[must_use]
    pub fn num_host_tokens(&self, tokens: &[Token], namespace: &[u8], num_tokens: usize) -> usize {
        let block_size = self.config.block_size;
        let limit = (tokens.len() - 1) / block_size;
        if num_tokens == limit * block_size {
            return 0;
        }
        let on_host = self.host.as_ref().and_then(|host| host.find(namespace, tokens, limit));
        (on_host.map_or(0, |on_host| on_host.blocks) * block_size).saturating_sub(num_tokens)
    }

    /// Where blocks behind a prefix can be had, if it is worth it.
    fn find_source(&self, tokens: &[Token], namespace: &[u8], found: Option<Found>, least: usize) -> Option<Source> {
        let block_size = self.config.block_size;
        let (start, limit) = (found.map_or(0, |found| found.blocks), (tokens.len() - 1) / block_size);
        let is_enough = |end: usize| end > start && (end - start) * block_size >= least;
        if start == limit {
            return None;
        }
        if let Some(found) = found
            && let Some((id, end)) = self.find_fetch(tokens, found, limit, is_enough)
        {
            return Some(Source::Plan(id, end));
        }
        let on_host = self.host.as_ref()?.find(namespace, tokens, limit)?;
        is_enough(on_host.blocks).then_some(Source::Host(on_host))
    }

    /// The first plan that brings the blocks behind a prefix for somebody else, and how far it agrees.
    fn find_fetch(
        &self,
        tokens: &[Token],
        found: Found,
        limit: usize,
        is_enough: impl Fn(usize) -> bool,
    ) -> Option<(PlanId, usize)> {
        let block_size = self.config.block_size;
        if !found.node.is_root() && found.within < self.index[found.node].run.len() {
            return None;
        }
        self.plans.fetches_at(self.place_behind(found, tokens)).find_map(|plan| {
            let end = self.fetched_end(plan, found, tokens, limit)?;
            let end = content::cut_back(tokens.len(), |at| tokens[at], end, block_size);
            is_enough(end).then_some((plan.id, end))
        })
    }

    /// What names the blocks of a prompt behind a found path.
    fn place_behind(&self, found: Found, tokens: &[Token]) -> (NodeId, u32) {
        let start = found.blocks * self.config.block_size;
        (found.node, self.index.hash(found.node, &tokens[start..start + self.config.block_size]))
    }

    /// How far a plan brings what a prompt wants behind a place.
    fn fetched_end(&self, plan: &Plan, place: Found, tokens: &[Token], limit: usize) -> Option<usize> {
        let Work::Fetch { start, source: Some(source), .. } = &plan.work else { return None };
        let host = self.host.as_ref()?;
        // Somebody waits for it, and holds the node above.
        if *start != place.blocks || !host.index.is_live(*source) {
            return None;
        }
        let block_size = self.config.block_size;
        let mut brought = with_capacity((start + plan.sources.len()) * block_size).ok()?;
        host.index.push_path_tokens(*source, start + plan.sources.len(), &mut brought);
        let agreed = brought.iter().zip(tokens).skip(start * block_size).take_while(|(a, b)| a == b).count();
        Some((start + agreed / block_size).min(limit))
    }

    /// Was a block that is fetched for a sequence forgotten?
    pub(super) fn is_fetch_forgotten(&self, sequence: &Sequence) -> bool {
        let plan = sequence.plan.and_then(|id| self.plans.get(id).ok().flatten());
        let Some(Plan { work: Work::Fetch { start, source: Some(source), members, .. }, sources, .. }) = plan else {
            return false;
        };
        let end = members.end_of(sequence.serial);
        let is_live = |host: &Host| host.index.live_part(*source, start + sources.len()).blocks >= end;
        self.host.as_ref().is_some_and(|host| !is_live(host))
    }

    fn admit_to_plan(
        &mut self,
        tokens: &[Token],
        namespace: &[u8],
        pinned: bool,
        found: Option<Found>,
        id: PlanId,
        end: usize,
    ) -> Result<Handle> {
        let start = found.map_or(0, |found| found.blocks);
        let Some(plan) = self.plans.get_mut(id) else { return Err(Error::Memory) };
        let mut shared: Vec<BlockId> = with_capacity(end - start)?;
        shared.extend_from_slice(&plan.targets[..end - start]);
        if let Work::Fetch { members, .. } = &mut plan.work {
            members.reserve(|handle| self.sequences.get(handle).is_some())?;
        }
        let admission = self.plan_fetch(tokens, found, Supply::Shared(shared))?;
        let handle = self.begin(tokens, namespace, pinned, &admission)?;
        self.wait_for(handle, id, end);
        Ok(handle)
    }

    fn admit_from_host(
        &mut self,
        tokens: &[Token],
        namespace: &[u8],
        pinned: bool,
        found: Option<Found>,
        on_host: Found,
    ) -> Result<Handle> {
        let start = found.map_or(0, |found| found.blocks);
        let len = on_host.blocks - start;
        let admission = self.plan_fetch(tokens, found, Supply::Transfer(len))?;
        let Some(host) = &mut self.host else { return Err(Error::Memory) };
        // Splits do not show. All that can be refused comes before the sequence begins.
        let source = host.end_at(on_host)?;
        let (mut sources, mut targets) = (with_capacity(len)?, with_capacity(len)?);
        host.index.push_path_blocks(source, on_host.blocks, start, &mut sources);
        let mut members = Members::default();
        members.reserve(|_| true)?;
        self.plans.reserve()?;

        let handle = self.begin(tokens, namespace, pinned, &admission)?;
        if let Some(host) = &mut self.host {
            host.hold(source);
        }
        let Some(sequence) = self.sequences.get(handle) else { return Ok(handle) };
        targets.extend_from_slice(&sequence.table[start..on_host.blocks]);
        let first_block = sequence.tail.block(0, self.config.block_size);
        let place = (sequence.end, self.index.hash(sequence.end, first_block));
        for &block in &targets {
            self.blocks.hold(block, 1);
        }
        let id = self.plans.insert(sources, targets, Work::Fetch { place, start, source: Some(source), members });
        self.wait_for(handle, id, on_host.blocks);
        Ok(handle)
    }

    fn plan_fetch(&mut self, tokens: &[Token], found: Option<Found>, supply: Supply) -> Result<Admission> {
        let blocks = tokens.len().div_ceil(self.config.block_size);
        let plan = self.plan_from(found, blocks, supply, || check_tokens(tokens, 0));
        self.counted(plan)
    }

    /// A new sequence waits for a plan.
    fn wait_for(&mut self, handle: Handle, id: PlanId, end: usize) {
        if let Some(sequence) = self.sequences.get_mut(handle) {
            sequence.state = State::Fetching;
            sequence.plan = Some(id);
        }
        if let Some(Plan { work: Work::Fetch { members, .. }, .. }) = self.plans.get_mut(id) {
            members.join(Member { sequence: handle, end });
        }
    }

    /// A sequence that waited was released. A plan that nobody waits for, and nobody has started, is cancelled.
    pub(super) fn leave_fetch(&mut self, sequence: &Sequence) {
        if let Some(id) = sequence.plan
            && self.plans.leave_fetch(id)
            && let Some(mut plan) = self.plans.remove(id)
        {
            self.end_fetch(&mut plan, End::Cancelled);
        }
    }

    /// A fetch has ended.
    pub(super) fn end_fetch(&mut self, plan: &mut Plan, end: End<'_>) {
        let num_done = end.num_done(plan);
        if end != End::Cancelled {
            self.counters.fetched_blocks += num_done as u64;
        }
        let Some(Work::Fetch { start, source, members, .. }) = plan.work.take() else { return };
        let blocks = start + plan.sources.len();
        let live =
            source.zip(self.host.as_ref()).map_or(blocks, |(source, host)| host.index.live_part(source, blocks).blocks);
        self.let_go_of_targets(plan.work.target(), &plan.targets);
        self.let_go_on_host(source);
        for member in members.iter() {
            let Some(mut sequence) = self.sequences.take(member.sequence) else { continue };
            let block_size = self.config.block_size;
            let blocks = member.end.min(start + num_done);
            let tail = &sequence.tail;
            // A hit does not end inside a run of content tokens. The tail starts where the fetch does.
            let kept = content::cut_back(tail.len(), |at| tail.get(at, block_size), blocks - start, block_size);
            let blocks = start + kept;
            (sequence.state, sequence.plan) = (State::Running, None);
            // What was forgotten meanwhile is not published again.
            sequence.is_silent |= live < member.end;
            if blocks > start {
                self.counters.hit_tokens += ((blocks - start) * block_size) as u64;
                sequence.num_cached = (blocks * block_size) as u32;
                self.commit_to(&mut sequence, blocks * block_size);
            }
            self.sequences.put_back(member.sequence, sequence);
        }
    }

    /// What the sequences that wait for a fetch keep when it is abandoned.
    pub(super) fn tokens_of_members(&self, id: PlanId) -> Result<Vec<Known>> {
        let mut tokens = Vec::new();
        if let Some(Plan { work: Work::Fetch { members, .. }, .. }) = self.plans.get(id)? {
            for member in members.iter() {
                if let Some(sequence) = self.sequences.get(member.sequence) {
                    memory::push(&mut tokens, self.known_tokens(sequence)?)?;
                }
            }
        }
        Ok(tokens)
    }

    /// A fetch is given up: who waited is preempted.
    pub(super) fn abandon_fetch(&mut self, members: &Members, tokens: Vec<Known>) {
        let mut tokens = tokens.into_iter();
        for member in members.iter() {
            let Some(mut sequence) = self.sequences.take(member.sequence) else { continue };
            let Some(tokens) = tokens.next() else { unreachable!("I10: the tokens of each were kept") };
            sequence.plan = None;
            let why = Why { reason: "its fetch was abandoned".into(), cost: 0.0 };
            self.preempt_with(&mut sequence, member.sequence, tokens, why);
            self.sequences.put_back(member.sequence, sequence);
        }
    }
}
