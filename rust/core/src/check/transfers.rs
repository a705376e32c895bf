//! What plans and the host hold, counted again: I1, I2, I6, I9.

use super::Checker;
use crate::blocks::State as BlockState;
use crate::error::Result;
use crate::evict::Eviction;
use crate::ids::{BlockId, Handle, NodeId};
use crate::index::Index;
use crate::memory::{self, zeroed};
use crate::sequence::State;
use crate::transfers::{Owner, Plan, PlanState, Tier, Work};
use crate::transit::Transit;

impl Checker<'_> {
    /// What plans hold on the device, and what they say of themselves.
    pub(super) fn check_plans(&mut self) -> Result<()> {
        let pager = self.pager;
        let (mut writing, mut quarantined) = ([0; 3], [0; 3]);
        let (mut ends, mut host_ends) = (Vec::new(), Vec::new());
        let sequences = self.count_waiting()?;
        for plan in pager.plans.iter() {
            let is_abandoned = matches!(plan.state, PlanState::Abandoned(_));
            let count = if is_abandoned { &mut quarantined } else { &mut writing };
            count[plan.work.target() as usize] += plan.targets.len();
            self.expect(plan.sources.len() == plan.targets.len(), || format!("I9: {:?} is lopsided", plan.id));
            if plan.work.target() == Tier::Device {
                for &block in &plan.targets {
                    self.count_hold(block, format_args!("{:?}", plan.id))?;
                }
            }
            if let Work::Offload { chains } = &plan.work {
                for chain in chains {
                    memory::push(&mut ends, chain.end)?;
                    let depth = pager.index.depth(chain.end);
                    self.expect(depth == chain.start + chain.len, || {
                        format!("I9: {:?} reads down to block {}, at {depth}", plan.id, chain.start + chain.len)
                    });
                }
            }
            if let Work::Save { chains, .. } = &plan.work {
                for &(end, _) in chains {
                    memory::push(&mut host_ends, end)?;
                }
            }
            self.check_waiting(plan, sequences[plan.id.number as usize]);
        }
        for sequence in pager.released_while_leaving() {
            self.check_running(sequence)?;
        }
        for tier in [Tier::Device, Tier::Host] {
            let counted = (pager.plans.num_writing(tier), pager.plans.num_quarantined(tier));
            let found = (writing[tier as usize], quarantined[tier as usize]);
            self.expect(counted == found, || {
                format!("I1: {} blocks writing and quarantined count {counted:?} and are {found:?}", tier.name())
            });
        }
        self.check_in_transit(&ends, &pager.index, &pager.evict, &pager.in_transit)?;
        match &pager.host {
            Some(host) => self.check_in_transit(&host_ends, &host.index, &host.evict, &host.in_transit),
            None => Ok(()),
        }
    }

    /// How many sequences wait for each plan, by its number.
    fn count_waiting(&mut self) -> Result<Vec<usize>> {
        let pager = self.pager;
        let mut waiting = zeroed(pager.plans.num_slots())?;
        for sequence in pager.sequences.iter() {
            let Some(id) = sequence.plan else { continue };
            if matches!(pager.plans.get(id), Ok(Some(_))) {
                waiting[id.number as usize] += 1;
            } else {
                self.violations.push(format!("I10: sequence {} waits for {id:?}, which is no more", sequence.serial));
            }
        }
        Ok(waiting)
    }

    /// Those who wait for a plan are those whom it names.
    fn check_waiting(&mut self, plan: &Plan, waiting: usize) {
        let (pager, mut named) = (self.pager, 0);
        let mut expect = |handle: Handle, state: State| {
            named += 1;
            let sequence = pager.sequences.get(handle);
            let waits = sequence.is_some_and(|sequence| sequence.state == state && sequence.plan == Some(plan.id));
            self.expect(waits, || format!("I10: {:?} is for {handle:?}, which does not wait for it", plan.id));
        };
        match &plan.work {
            Work::Fetch { members, .. } => {
                // Who was released is named, and not counted.
                for handle in members.iter().map(|member| member.sequence) {
                    if pager.sequences.get(handle).is_some() {
                        expect(handle, State::Fetching);
                    }
                }
            }
            Work::SwapOut { owner: Owner::Sequence(handle), .. } => expect(*handle, State::SwappingOut),
            Work::SwapIn { owner: Owner::Sequence(handle) } => expect(*handle, State::SwappingIn),
            _ => {}
        }
        let counted = if let Work::Fetch { members, .. } = &plan.work { members.num_waiting() } else { named };
        self.expect((waiting, counted) == (named, named), || {
            format!("I10: {waiting} sequences wait for {:?}, which counts {counted} and is for {named}", plan.id)
        });
    }

    fn check_in_transit(
        &mut self,
        ends: &[NodeId],
        index: &Index,
        evict: &Eviction,
        in_transit: &Transit,
    ) -> Result<()> {
        let mut holds: Vec<u32> = zeroed(index.num_node_slots())?;
        for &end in ends {
            let mut node = end;
            while !node.is_root() {
                holds[node.index()] += 1;
                if holds[node.index()] > 1 {
                    break;
                }
                node = index[node].parent;
            }
        }
        for (id, _) in index.nodes() {
            let (counted, expected) = (in_transit.holds(id), holds[id.index()]);
            let is_marked = evict.slot(id).is_in_transit();
            self.expect(counted == expected && is_marked == (expected > 0), || {
                format!("I9: {id:?} counts {counted} plans and children in transit and has {expected}")
            });
        }
        let known = in_transit.len();
        let found = holds.iter().filter(|&&holds| holds > 0).count();
        self.expect(known == found, || format!("I9: {known} nodes are noted as in transit, and {found} are"));
        Ok(())
    }

    /// The host tier: each block in one place, held as often as somebody holds it, children evicted first.
    pub(super) fn check_host(&mut self) -> Result<()> {
        let pager = self.pager;
        let Some(host) = &pager.host else { return Ok(()) };
        let block_size = pager.config().block_size;
        let mut seen: Vec<u8> = zeroed(host.num_blocks())?;
        let mut note = |block: BlockId| seen[block as usize] = seen[block as usize].saturating_add(1);
        let mut pins: Vec<u32> = zeroed(host.index.num_node_slots())?;
        let mut pin = |end: Option<NodeId>| {
            if let Some(end) = end {
                pins[end.index()] += 1;
            }
        };

        let mut saving: Vec<bool> = zeroed(host.num_blocks())?;
        let mut own = 0;
        for away in pager.aways() {
            pin(away.end);
            own += away.own.len();
            away.own.iter().copied().for_each(&mut note);
        }
        for plan in pager.plans.iter() {
            if plan.work.target() == Tier::Host {
                plan.targets.iter().copied().for_each(&mut note);
            }
            match &plan.work {
                Work::Offload { chains } => chains.iter().for_each(|chain| pin(chain.above)),
                Work::Fetch { source, .. } => pin(*source),
                Work::Load(load) => pin(load.above),
                Work::Save { .. } => plan.sources.iter().for_each(|&block| saving[block as usize] = true),
                _ => {}
            }
        }
        let mut free = 0;
        for block in host.blocks.iter_free() {
            free += 1;
            note(block);
        }
        let stale: usize = host.evict.iter(host.evict.stale()).map(|id| host.index[id].run.len()).sum();
        let mut held_children: Vec<u32> = zeroed(host.index.num_node_slots())?;
        let (mut cached, mut active) = (0, own);
        for (id, node) in host.index.nodes() {
            node.run.blocks(block_size).iter().copied().for_each(&mut note);
            let is_read = host.evict.slot(id).is_in_transit();
            if node.is_held() || is_read {
                active += node.run.len();
            }
            if node.is_held() {
                if !node.parent.is_root() {
                    held_children[node.parent.index()] += 1;
                }
            } else if host.index.is_live(id) && !is_read {
                cached += node.run.len();
            }
        }
        for (id, node) in host.index.nodes() {
            let (pins, held) = (pins[id.index()], held_children[id.index()]);
            self.expect((node.pins, node.held_children) == (pins, held), || {
                format!(
                    "I2: host {id:?} counts {} pins and {} held children and has {pins} and {held}",
                    node.pins, node.held_children
                )
            });
            let strange = node.run.blocks(block_size).iter().filter(|&&block| !host.blocks.is_indexed(block)).count();
            self.expect(strange == 0, || {
                format!("I2: {strange} blocks of host {id:?} do not know that they are indexed")
            });
        }
        for (block, &saving) in saving.iter().enumerate() {
            self.expect(host.stored.is_saving(block as BlockId) == saving, || {
                format!("I9: host block {block} is being saved: {saving}, and is marked otherwise")
            });
        }
        for (block, times) in seen.iter().enumerate().filter(|&(_, &times)| times != 1) {
            // What a reset left is found once, as a node's.
            self.violations.push(format!("I1: host block {block} is in {times} places"));
        }
        let wrong = host.blocks.iter_free().filter(|&block| host.blocks.state(block) != BlockState::Free).count();
        self.expect(wrong == 0, || format!("I2: {wrong} host blocks are on the free stack and not free"));
        let stats = pager.stats().host;
        let counted = (stats.free_blocks, stats.cached_blocks, stats.active_blocks);
        let found = (free + stale, cached, active);
        self.expect(counted == found, || {
            format!("I1: host blocks free, cached and active count {counted:?} and are {found:?}")
        });
        self.check_host_queue()
    }

    fn check_host_queue(&mut self) -> Result<()> {
        let Some(host) = &self.pager.host else { return Ok(()) };
        let mut place = zeroed(host.index.num_node_slots())?;
        let queues = host.evict.iter_queues().flat_map(|(_, queue)| host.evict.iter(queue));
        for (nth, id) in queues.enumerate() {
            let node = &host.index[id];
            let is_idle = node.in_use() && host.index.is_live(id) && !node.is_held();
            self.expect(is_idle, || format!("I2: host {id:?} waits to be evicted but is not idle"));
            place[id.index()] = nth + 1;
        }
        for (id, node) in host.index.nodes().filter(|(id, node)| host.index.is_live(*id) && !node.is_held()) {
            let nth = place[id.index()];
            self.expect(nth > 0, || format!("I2: host {id:?} is idle and waits in no queue"));
            let above = if node.parent.is_root() { 0 } else { place[node.parent.index()] };
            self.expect(above == 0 || nth < above, || {
                format!("I6: host {:?} would be evicted before its child {id:?}", node.parent)
            });
        }
        Ok(())
    }
}
