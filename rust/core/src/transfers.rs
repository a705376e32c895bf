//! Plans: what is to be copied between the tiers, for whom, and how far it is.
//!
//! The core plans and guards, a mover copies, the core is told. A plan is named by a number, which is used again once it
//! has ended, and a generation, by which late reports of it are recognised.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use crate::digest::{Digest, Records};
use crate::error::{Error, Result};
use crate::ids::{BlockId, Handle, NodeId, Token};
pub use crate::ids::{PlanId, Tier};
use crate::memory::{Table, with_capacity, zeroed};
use crate::sequence::Sequence;

/// How far a plan is. (One that has ended is no more.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanState {
    /// It may be cancelled.
    Planned,
    /// A mover copies, since this tick.
    Started(u64),
    /// Nobody knows what a mover does. It was started at this tick.
    Abandoned(u64),
}

impl PlanState {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Started(_) => "started",
            Self::Abandoned(_) => "abandoned",
        }
    }

    /// When it was started.
    #[must_use]
    pub const fn tick(self) -> Option<u64> {
        match self {
            Self::Planned => None,
            Self::Started(tick) | Self::Abandoned(tick) => Some(tick),
        }
    }
}

/// Consecutive blocks of one path that an offload copies.
#[derive(Debug)]
pub struct Chain {
    /// The device's node that ends with them, which the plan holds.
    pub end: NodeId,
    /// Blocks of the path above them.
    pub start: usize,
    /// How many they are.
    pub len: usize,
    /// The host's node that ends with the block above them, which the plan holds; none where that is not there.
    pub above: Option<NodeId>,
}

/// Blocks of the host that a store brings, as far as they are still wanted.
#[derive(Debug)]
pub struct Load {
    /// Encoded.
    pub namespace: Box<[u8]>,
    /// The path down to the last of them.
    pub tokens: Vec<Token>,
    /// Blocks of the path above them.
    pub start: usize,
    /// Blocks of the path that nobody has forgotten since.
    pub stop: usize,
    /// The host's node that ends with the block above them, which the plan holds; none for the first block of a path.
    pub above: Option<NodeId>,
    /// How the store knows them.
    pub records: Records,
}

/// Who takes part in a fetch.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// The sequence.
    pub sequence: Handle,
    /// It gets the blocks of its path up to here.
    pub end: usize,
}

/// Those who take part in a fetch, in the order of joining. Who is released leaves by being counted no more: nobody is
/// looked for, and a released sequence's handle reaches nobody.
#[derive(Debug, Default)]
pub struct Members {
    /// The order of joining is that of the serial numbers: a sequence joins when it is admitted.
    joined: Vec<Member>,
    num_waiting: usize,
}

impl Members {
    /// Makes room for one more: in the place of those who have left, if they are the half.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn reserve(&mut self, is_waiting: impl Fn(Handle) -> bool) -> Result<()> {
        if self.joined.len() == self.joined.capacity() && self.num_waiting <= self.joined.len() / 2 {
            self.joined.retain(|member| is_waiting(member.sequence));
        }
        Ok(self.joined.try_reserve(1)?)
    }

    /// One more takes part; `reserve` made room.
    pub fn join(&mut self, member: Member) {
        self.joined.push(member);
        self.num_waiting += 1;
    }

    /// One of them was released.
    pub const fn leave(&mut self) {
        self.num_waiting -= 1;
    }

    /// How many wait.
    #[must_use]
    pub const fn num_waiting(&self) -> usize {
        self.num_waiting
    }

    /// The part of one of them, 0 for nobody.
    #[must_use]
    pub fn end_of(&self, serial: u64) -> usize {
        let found = self.joined.binary_search_by_key(&serial, |member| member.sequence.serial);
        found.map_or(0, |nth| self.joined[nth].end)
    }

    /// All who have joined, also those who were released.
    pub fn iter(&self) -> impl Iterator<Item = &Member> {
        self.joined.iter()
    }
}

/// The sequence behind a swap.
#[derive(Debug)]
pub enum Owner {
    /// It is still there.
    Sequence(Handle),
    /// It was released: the plan holds what is being read for it.
    Released(Box<Sequence>),
    /// It was released or is swapped again, and the plan holds nothing for it.
    Nobody,
}

impl Owner {
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Nobody)
    }
}

/// Why blocks are copied, and what the plan holds besides its destinations.
#[derive(Debug)]
pub enum Work {
    /// Cold blocks go to the host.
    Offload {
        /// What is read.
        chains: Vec<Chain>,
    },
    /// An admission's blocks come back.
    Fetch {
        /// The device's node above them, and the hash of the first of them: what others who want them look for.
        place: (NodeId, u32),
        /// Blocks of the path above them.
        start: usize,
        /// The host's node that ends with the last of them.
        source: Option<NodeId>,
        /// Who waits for them.
        members: Members,
    },
    /// A sequence leaves the device.
    SwapOut {
        /// Who.
        owner: Owner,
        /// Blocks of its path that were on the host already.
        start: usize,
    },
    /// A sequence comes back.
    SwapIn {
        /// Who.
        owner: Owner,
    },
    /// Cold host blocks go to a store.
    Save {
        /// The host's nodes that end with each chain, which the plan holds, and the chain's length.
        chains: Vec<(NodeId, usize)>,
        /// How the store is to know the blocks.
        records: Records,
    },
    /// Blocks come to the host from a store.
    Load(Box<Load>),
}

impl Work {
    /// The word for it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Offload { .. } => "offload",
            Self::Fetch { .. } => "fetch",
            Self::SwapOut { .. } => "swap_out",
            Self::SwapIn { .. } => "swap_in",
            Self::Save { .. } => "save",
            Self::Load(_) => "load",
        }
    }

    /// Where the bytes come from.
    #[must_use]
    pub const fn source(&self) -> Tier {
        match self {
            Self::Offload { .. } | Self::SwapOut { .. } => Tier::Device,
            Self::Fetch { .. } | Self::SwapIn { .. } | Self::Save { .. } => Tier::Host,
            Self::Load(_) => Tier::Store,
        }
    }

    /// Everything that a plan between the device and the host holds besides its destinations, taken out of it.
    #[must_use]
    pub fn take(&mut self) -> Option<Self> {
        Some(match self {
            Self::Offload { chains } => Self::Offload { chains: std::mem::take(chains) },
            Self::Fetch { place, start, source, members } => {
                let (place, start) = (*place, *start);
                Self::Fetch { place, start, source: source.take(), members: std::mem::take(members) }
            }
            Self::SwapOut { owner, start } => Self::SwapOut { owner: owner.take(), start: *start },
            Self::SwapIn { owner } => Self::SwapIn { owner: owner.take() },
            Self::Save { .. } | Self::Load(_) => return None,
        })
    }

    /// How a store knows the blocks, where there is one behind the plan.
    #[must_use]
    pub fn records(&self) -> Option<&Records> {
        match self {
            Self::Save { records, .. } => Some(records),
            Self::Load(load) => Some(&load.records),
            _ => None,
        }
    }

    /// Where they go.
    #[must_use]
    pub const fn target(&self) -> Tier {
        match self {
            Self::Offload { .. } | Self::SwapOut { .. } | Self::Load(_) => Tier::Host,
            Self::Fetch { .. } | Self::SwapIn { .. } => Tier::Device,
            Self::Save { .. } => Tier::Store,
        }
    }
}

/// A plan that has not ended.
#[derive(Debug)]
pub struct Plan {
    /// Its name.
    pub id: PlanId,
    /// Counts plans: their order.
    pub serial: u64,
    /// How far it is.
    pub state: PlanState,
    /// What is read.
    pub sources: Vec<BlockId>,
    /// What is written, which the plan holds.
    pub targets: Vec<BlockId>,
    /// What for.
    pub work: Work,
}

/// All plans that have not ended.
#[derive(Debug)]
pub struct Plans {
    /// By number: how often it has been used, and by whom it is.
    slots: Vec<(u32, Option<Box<Plan>>)>,
    /// Numbers that are free, the lowest on top; room for all.
    free: BinaryHeap<Reverse<u32>>,
    next_serial: u64,
    /// Blocks of each tier that plans write, and of these the abandoned ones'.
    writing: [usize; 3],
    quarantined: [usize; 3],
    in_flight: InFlight,
    /// Fetches that somebody waits for, by their places and their order.
    fetches: BTreeMap<(NodeId, u32, u64), PlanId>,
    /// Loads of which all is still wanted, by the keys of their first blocks; room for one more.
    loads: Table<Digest, PlanId>,
}

/// Device blocks that offloads bring to the host.
#[derive(Debug, Default)]
struct InFlight {
    is_there: Vec<bool>,
    count: usize,
}

impl InFlight {
    fn set(&mut self, blocks: &[BlockId], in_flight: bool) {
        for &block in blocks {
            self.is_there[block as usize] = in_flight;
        }
        self.count = if in_flight { self.count + blocks.len() } else { self.count - blocks.len() };
    }
}

impl Plans {
    /// No plans. Where there is a host tier, the device has so many blocks, else 0.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(num_blocks: usize) -> Result<Self> {
        Ok(Self {
            slots: Vec::new(),
            free: BinaryHeap::new(),
            next_serial: 0,
            writing: [0; 3],
            quarantined: [0; 3],
            in_flight: InFlight { is_there: zeroed(num_blocks)?, count: 0 },
            fetches: BTreeMap::new(),
            loads: Table::default(),
        })
    }

    /// An offload is to bring these blocks to the host.
    pub fn begin_flight(&mut self, blocks: &[BlockId]) {
        self.in_flight.set(blocks, true);
    }

    /// Of some blocks: the first that no offload brings to the host, and those directly behind it.
    #[must_use]
    pub fn first_not_in_flight(&self, blocks: &[BlockId]) -> Range<usize> {
        if self.in_flight.count == 0 {
            return 0..blocks.len();
        }
        let in_flight = |&block: &BlockId| self.in_flight.is_there[block as usize];
        let start = blocks.iter().position(|block| !in_flight(block)).unwrap_or(blocks.len());
        let len = blocks[start..].iter().position(in_flight).unwrap_or(blocks.len() - start);
        start..start + len
    }

    /// Makes room for a plan, so that adding it and ending it cannot fail.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn reserve(&mut self) -> Result<()> {
        self.slots.try_reserve(1)?;
        self.loads.try_reserve(1)?;
        Ok(self.free.try_reserve(self.slots.len() + 1 - self.free.len())?)
    }

    /// The name that the next plan will have.
    #[must_use]
    pub fn next_id(&self) -> PlanId {
        let number = self.free.peek().map_or(self.slots.len() as u32, |number| number.0);
        let generation = self.slots.get(number as usize).map_or(0, |slot| slot.0);
        PlanId { number, generation }
    }

    /// Adds a plan; `reserve` made room.
    pub fn insert(&mut self, sources: Vec<BlockId>, targets: Vec<BlockId>, work: Work) -> PlanId {
        let id = self.next_id();
        let serial = self.next_serial;
        self.next_serial += 1;
        self.writing[work.target() as usize] += targets.len();
        if let Work::Fetch { place: (node, hash), .. } = work {
            self.fetches.insert((node, hash, serial), id);
        }
        if let Work::Load(load) = &work {
            self.loads.insert(load.records.keys[0], id);
        }
        let plan = Box::new(Plan { id, serial, state: PlanState::Planned, sources, targets, work });
        if self.free.pop().is_some() {
            self.slots[id.number as usize].1 = Some(plan);
        } else {
            self.slots.push((0, Some(plan)));
        }
        id
    }

    /// The plan of this name, unless it has ended.
    ///
    /// # Errors
    /// `Value` if there never was one.
    pub fn get(&self, id: PlanId) -> Result<Option<&Plan>> {
        match self.slots.get(id.number as usize) {
            Some((generation, plan)) if *generation == id.generation && plan.is_some() => Ok(plan.as_deref()),
            Some((generation, _)) if *generation > id.generation => Ok(None),
            _ => Err(Error::Value(format!(
                "this pager has made no plan {} of generation {}: it is another pager's",
                id.number, id.generation
            ))),
        }
    }

    /// The plan of this name, to be changed; not to be ended.
    pub fn get_mut(&mut self, id: PlanId) -> Option<&mut Plan> {
        match self.slots.get_mut(id.number as usize) {
            Some((generation, plan)) if *generation == id.generation => plan.as_deref_mut(),
            _ => None,
        }
    }

    /// The plan has ended: its number is free.
    pub fn remove(&mut self, id: PlanId) -> Option<Box<Plan>> {
        let (generation, slot) = self.slots.get_mut(id.number as usize)?;
        let plan = slot.take()?;
        *generation += 1;
        self.free.push(Reverse(id.number));
        let tier = plan.work.target() as usize;
        match plan.state {
            PlanState::Abandoned(_) => self.quarantined[tier] -= plan.targets.len(),
            _ => self.writing[tier] -= plan.targets.len(),
        }
        self.end_flight(&plan);
        Some(plan)
    }

    /// Fetches of blocks at a place that somebody waits for, oldest first.
    pub fn fetches_at(&self, (node, hash): (NodeId, u32)) -> impl Iterator<Item = &Plan> {
        let ids = self.fetches.range((node, hash, 0)..=(node, hash, u64::MAX));
        ids.filter_map(|(_, &id)| self.get(id).ok().flatten())
    }

    /// One of those who wait for a fetch was released. Answers whether that was the last, and nobody has started the plan.
    pub fn leave_fetch(&mut self, id: PlanId) -> bool {
        let Some(Plan { serial, state, work: Work::Fetch { place: (node, hash), members, .. }, .. }) = self.get_mut(id)
        else {
            return false;
        };
        members.leave();
        if members.num_waiting() > 0 {
            return false;
        }
        let (key, is_planned) = ((*node, *hash, *serial), *state == PlanState::Planned);
        self.fetches.remove(&key);
        is_planned
    }

    /// The load that brings the block of this key first.
    #[must_use]
    pub fn load_at(&self, key: &Digest) -> Option<PlanId> {
        self.loads.get(key).copied()
    }

    /// The last block of a path, and what is below it, is not to come from a store any more: nothing is, without a path.
    /// Looks at each plan.
    pub fn forget_loads(&mut self, path: Option<(&[u8], &[Token])>) {
        for plan in self.slots.iter_mut().filter_map(|(_, plan)| plan.as_deref_mut()) {
            let Work::Load(load) = &mut plan.work else { continue };
            let block_size = load.tokens.len() / (load.start + plan.targets.len());
            let stop = match path {
                None => 0,
                Some((name, tokens)) if *load.namespace == *name && load.tokens.starts_with(tokens) => {
                    tokens.len() / block_size - 1
                }
                Some(_) => continue,
            };
            load.stop = load.stop.min(stop);
            forget_load(&mut self.loads, load, plan.id);
        }
    }

    /// A started plan is given up.
    pub fn abandon(&mut self, id: PlanId) {
        let Some((_, slot)) = self.slots.get_mut(id.number as usize) else { return };
        let Some(mut plan) = slot.take() else { return };
        if let PlanState::Started(tick) = plan.state {
            let (tier, len) = (plan.work.target() as usize, plan.targets.len());
            self.writing[tier] -= len;
            self.quarantined[tier] += len;
            self.end_flight(&plan);
            plan.state = PlanState::Abandoned(tick);
        }
        self.slots[id.number as usize].1 = Some(plan);
    }

    /// Nobody waits for what a plan brings any more.
    fn end_flight(&mut self, plan: &Plan) {
        if matches!(plan.state, PlanState::Abandoned(_)) {
            return;
        }
        match plan.work {
            Work::Offload { .. } => self.in_flight.set(&plan.sources, false),
            Work::Fetch { place: (node, hash), .. } => {
                self.fetches.remove(&(node, hash, plan.serial));
            }
            Work::Load(ref load) => forget_load(&mut self.loads, load, plan.id),
            Work::SwapOut { .. } | Work::SwapIn { .. } | Work::Save { .. } => {}
        }
    }

    /// Blocks of a tier that plans write.
    #[must_use]
    pub const fn num_writing(&self, tier: Tier) -> usize {
        self.writing[tier as usize]
    }

    /// Blocks of a tier that abandoned plans may still write.
    #[must_use]
    pub const fn num_quarantined(&self, tier: Tier) -> usize {
        self.quarantined[tier as usize]
    }

    /// Plans that have been there at once: their numbers are below this.
    #[must_use]
    pub const fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// All plans, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = &Plan> {
        self.slots.iter().filter_map(|(_, plan)| plan.as_deref())
    }

    /// All plans, in the order in which they were made.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn in_order(&self) -> Result<Vec<&Plan>> {
        let mut plans = with_capacity(self.slots.len())?;
        plans.extend(self.iter());
        plans.sort_unstable_by_key(|plan: &&Plan| plan.serial);
        Ok(plans)
    }
}

/// Nobody may wait for a load any more: who wants its blocks has another one made.
fn forget_load(loads: &mut Table<Digest, PlanId>, load: &Load, id: PlanId) {
    let first = load.records.keys[0];
    if loads.get(&first) == Some(&id) {
        loads.remove(&first);
    }
}
