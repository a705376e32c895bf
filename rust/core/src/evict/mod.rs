//! Eviction: queues of idle nodes, and the seam behind which a policy decides who waits in which.
//!
//! - A slot per node, at the node's index, holds what eviction knows of it. It is opaque to everybody else.
//! - Only idle nodes are in a queue. Within one release the deeper node joins first, and a parent becomes idle no
//!   earlier than its children, so the front of a queue is always a leaf: LRU in O(1), without timestamps and without
//!   looking for leaves.
//! - A policy sees what happens to nodes and to the sequences behind (`Context`), names the queue that an idle node
//!   joins, and may demand that a queue's coldest blocks move on (`excess`). It never sees the pool, the tree or
//!   tokens; nobody else knows which policy runs.
//! - A node that a plan reads (*in transit*) keeps its place in its queue, and is passed over: the plan's hold says
//!   nothing about who will want it. What is passed over lies at the cold end, so each queue remembers how far that
//!   goes, and no eviction looks at it twice.
//! - The *stale* queue holds what `reset` left behind: frames that count as free and are handed out last.

mod lru;
mod slru;

use crate::config::PolicyKind;
use crate::error::Result;
use crate::ids::NodeId;
use crate::list::{Linked, Links, List};
use crate::memory::with_capacity;

/// Why a sequence lets go of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Departure {
    /// `release("finished")`.
    Finished,
    /// `release("aborted")`, or the handle was dropped.
    Aborted,
    /// It will come back.
    Preempted,
    /// It was cut, or follows another path.
    Moved,
    /// A queued copy was handed out or withdrawn.
    Copied,
}

/// The sequence behind a call, as far as a policy may know it.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Its number; none behind a copy.
    pub sequence: Option<u64>,
    /// Admitted with `pin=True`?
    pub pinned: bool,
    /// Why blocks are let go of.
    pub departure: Departure,
}

impl Context {
    /// A queued copy was handed out or withdrawn: there is no sequence behind that.
    pub const COPY: Self = Self { sequence: None, pinned: false, departure: Departure::Copied };
}

/// What eviction knows of a node.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    links: Links,
    idle_since: u64,
    hits: u32,
    queue: u8,
    marked: bool,
    in_transit: bool,
}

impl Slot {
    const NO_QUEUE: u8 = u8::MAX;
    const NEW: Self =
        Self { links: Links::NONE, idle_since: 0, hits: 0, queue: Self::NO_QUEUE, marked: false, in_transit: false };

    /// Admits that hit it since it was indexed.
    #[must_use]
    pub const fn hits(&self) -> u32 {
        self.hits
    }

    /// The clock when its last holder left.
    #[must_use]
    pub const fn idle_since(&self) -> u64 {
        self.idle_since
    }

    /// The policy's own mark.
    #[must_use]
    pub const fn is_marked(&self) -> bool {
        self.marked
    }

    /// Does a plan read it, or something below it?
    #[must_use]
    pub const fn is_in_transit(&self) -> bool {
        self.in_transit
    }

    /// Does it wait in a queue?
    #[must_use]
    pub const fn is_queued(&self) -> bool {
        self.queue != Self::NO_QUEUE
    }
}

/// A queue of idle nodes, coldest first.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    list: List,
    blocks: usize,
    /// The warmest of the nodes at the cold end that eviction passes over.
    passed: NodeId,
    /// The warmest of the nodes at the cold end that have been offered to the host.
    offered: NodeId,
}

impl Queue {
    const EMPTY: Self = Self { list: List::EMPTY, blocks: 0, passed: NodeId::NONE, offered: NodeId::NONE };

    /// Blocks of its nodes, those in transit included.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Which of its two marks are at a node are at another from now on.
    fn move_marks(&mut self, from: NodeId, to: NodeId) {
        for mark in [&mut self.passed, &mut self.offered] {
            if *mark == from {
                *mark = to;
            }
        }
    }

    /// Its coldest node.
    #[must_use]
    pub const fn coldest(&self) -> Option<NodeId> {
        self.list.front.some()
    }
}

/// Blocks that a policy wants to move from the cold end of one queue to the recent end of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Excess {
    /// The queue that is too long.
    pub from: usize,
    /// Where its coldest go.
    pub to: usize,
    /// How many blocks.
    pub blocks: usize,
}

/// Decides who waits where. Every method is O(1).
pub trait Policy: std::fmt::Debug + Send {
    /// Names of the queues; victims come from the first that is not empty.
    fn queues(&self) -> &'static [&'static str];

    /// The queue that a node joins whose last holder left.
    fn on_idle(&mut self, slot: &Slot, context: Context) -> usize;

    /// An admission hit the node; answers whether to mark it.
    fn on_hit(&mut self, _slot: &Slot) -> bool {
        false
    }

    /// A sequence was admitted, with that many hit blocks.
    fn on_admit(&mut self, _context: Context, _hit_blocks: usize) {}

    /// A sequence published blocks.
    fn on_commit(&mut self, _context: Context, _blocks: usize) {}

    /// Blocks of the node were evicted.
    fn on_evict(&mut self, _slot: &Slot, _blocks: usize) {}

    /// Is a queue too long?
    fn excess(&self, _queues: &[Queue]) -> Option<Excess> {
        None
    }
}

/// The queues and the policy that rules them.
#[derive(Debug)]
pub struct Eviction {
    slots: Slots,
    queues: Vec<Queue>,
    stale: Queue,
    /// Blocks of queued nodes that are in transit.
    in_transit: usize,
    policy: Box<dyn Policy>,
}

#[derive(Debug)]
struct Slots(Vec<Slot>);

impl Linked for Slots {
    fn links(&mut self, id: NodeId) -> &mut Links {
        &mut self.0[id.index()].links
    }
}

impl Eviction {
    /// No node is idle.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(kind: PolicyKind, num_blocks: usize) -> Result<Self> {
        let policy: Box<dyn Policy> = match kind {
            PolicyKind::Lru => Box::new(lru::Lru),
            PolicyKind::Slru => Box::new(slru::Slru::new(num_blocks)),
        };
        let queues = vec![Queue::EMPTY; policy.queues().len()];
        Ok(Self { slots: Slots(with_capacity(num_blocks)?), queues, stale: Queue::EMPTY, in_transit: 0, policy })
    }

    /// The policy, to be told of what happens to sequences.
    pub fn policy(&mut self) -> &mut dyn Policy {
        &mut *self.policy
    }

    /// What is known of a node.
    #[must_use]
    pub fn slot(&self, id: NodeId) -> &Slot {
        &self.slots.0[id.index()]
    }

    /// Blocks that can be evicted.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.queues.iter().map(Queue::blocks).sum::<usize>() - self.in_transit
    }

    /// A plan reads the node, or something below it, or none does any more.
    pub fn set_in_transit(&mut self, id: NodeId, blocks: usize, in_transit: bool) {
        let slot = &mut self.slots.0[id.index()];
        slot.in_transit = in_transit;
        if slot.is_queued() {
            if in_transit {
                self.in_transit += blocks;
            } else {
                self.in_transit -= blocks;
                self.queues[slot.queue as usize].passed = NodeId::NONE;
            }
        }
    }

    /// Blocks of before a reset, which count as free.
    #[must_use]
    pub const fn num_stale(&self) -> usize {
        self.stale.blocks
    }

    /// A node came into being.
    pub fn start(&mut self, id: NodeId) {
        if id.index() == self.slots.0.len() {
            self.slots.0.push(Slot::NEW);
        } else {
            self.slots.0[id.index()] = Slot::NEW;
        }
    }

    /// A node was split: the new upper half is as its lower half, and warmer.
    pub fn split(&mut self, lower: NodeId, upper: NodeId) {
        self.start(upper);
        self.slots.0[upper.index()] = self.slots.0[lower.index()];
        let slot = self.slot(lower);
        if slot.is_queued() {
            let queue = slot.queue as usize;
            let queue = &mut self.queues[queue];
            queue.list.insert_after(&mut self.slots, lower, upper);
            queue.move_marks(lower, upper);
        }
    }

    /// An admission hit the node.
    pub fn hit(&mut self, id: NodeId) {
        let slot = &mut self.slots.0[id.index()];
        slot.hits = slot.hits.saturating_add(1);
        slot.marked |= self.policy.on_hit(slot);
    }

    /// The node's last holder left.
    pub fn enqueue(&mut self, id: NodeId, blocks: usize, clock: u64, context: Context) {
        let slot = &mut self.slots.0[id.index()];
        slot.idle_since = clock;
        let queue = self.policy.on_idle(slot, context);
        slot.queue = queue as u8;
        if slot.in_transit {
            self.in_transit += blocks;
        }
        let queue = &mut self.queues[queue];
        queue.blocks += blocks;
        queue.list.push_back(&mut self.slots, id);
    }

    /// The node is held again, or gone.
    pub fn dequeue(&mut self, id: NodeId, blocks: usize) {
        let slot = &mut self.slots.0[id.index()];
        let queue = std::mem::replace(&mut slot.queue, Slot::NO_QUEUE);
        if queue != Slot::NO_QUEUE {
            if slot.in_transit {
                self.in_transit -= blocks;
            }
            let queue = &mut self.queues[queue as usize];
            queue.blocks -= blocks;
            queue.move_marks(id, slot.links.colder);
            queue.list.remove(&mut self.slots, id);
        }
    }

    /// The node whose tail is evicted next: a leaf.
    #[must_use]
    pub fn victim(&mut self) -> Option<NodeId> {
        let slots = &self.slots.0;
        self.queues.iter_mut().find_map(|queue| {
            let mut next = queue.passed.some().map_or(queue.list.front, |id| slots[id.index()].links.warmer);
            while let Some(id) = next.some()
                && slots[id.index()].in_transit
            {
                queue.passed = id;
                next = slots[id.index()].links.warmer;
            }
            next.some()
        })
    }

    /// The coldest node of a queue that has not been offered to the host.
    #[must_use]
    pub fn unoffered(&self, queue: usize) -> Option<NodeId> {
        let queue = &self.queues[queue];
        let warmer = |id: NodeId| self.slot(id).links.warmer;
        queue.offered.some().map_or(queue.list.front, warmer).some()
    }

    /// The node that `unoffered` answered has been offered.
    pub fn set_offered(&mut self, queue: usize, id: NodeId) {
        self.queues[queue].offered = id;
    }

    /// Nodes that eviction could take, coldest first, with those in transit.
    pub fn in_eviction_order(&self) -> impl Iterator<Item = NodeId> {
        self.queues.iter().flat_map(|queue| self.iter(queue))
    }

    /// The node that comes after this one in its queue.
    #[must_use]
    pub fn after(&self, id: NodeId) -> Option<NodeId> {
        self.slot(id).links.warmer.some()
    }

    /// Blocks of the node are evicted off its tail.
    pub fn evict(&mut self, id: NodeId, blocks: usize) {
        let slot = &self.slots.0[id.index()];
        self.queues[slot.queue as usize].blocks -= blocks;
        self.policy.on_evict(slot, blocks);
    }

    /// The stale node whose tail is handed out next.
    #[must_use]
    pub fn stalest(&self) -> Option<NodeId> {
        self.stale.coldest()
    }

    /// Blocks of the coldest stale node are handed out; `all` of those it has left.
    pub fn take_stale(&mut self, id: NodeId, blocks: usize, all: bool) {
        self.stale.blocks -= blocks;
        if all {
            self.stale.list.remove(&mut self.slots, id);
            self.slots.0[id.index()].queue = Slot::NO_QUEUE;
        }
    }

    /// Everything idle becomes stale, in eviction order. O(1): a stale node's slot still names the queue it came
    /// from, but nothing holds or splits a stale node, so nobody asks.
    pub fn retire(&mut self) {
        debug_assert!(self.in_transit == 0, "I9: what a plan reads was taken out before");
        for queue in &mut self.queues {
            (queue.passed, queue.offered) = (NodeId::NONE, NodeId::NONE);
            self.stale.list.append(&mut self.slots, &mut queue.list);
            self.stale.blocks += std::mem::take(&mut queue.blocks);
        }
    }

    /// What the policy wants moved.
    #[must_use]
    pub fn excess(&self) -> Option<Excess> {
        self.policy.excess(&self.queues)
    }

    /// The coldest node of a queue.
    #[must_use]
    pub fn coldest_of(&self, queue: usize) -> Option<NodeId> {
        self.queues[queue].coldest()
    }

    /// Moves a node to another queue's recent end and clears its mark.
    pub fn demote(&mut self, id: NodeId, blocks: usize, to: usize) {
        self.dequeue(id, blocks);
        let slot = &mut self.slots.0[id.index()];
        (slot.queue, slot.marked) = (to as u8, false);
        if slot.in_transit {
            self.in_transit += blocks;
        }
        self.queues[to].blocks += blocks;
        self.queues[to].list.push_back(&mut self.slots, id);
    }

    /// Each queue's name and nodes, coldest first.
    pub fn iter_queues(&self) -> impl Iterator<Item = (&'static str, &Queue)> {
        self.policy.queues().iter().copied().zip(&self.queues)
    }

    /// The stale queue.
    #[must_use]
    pub const fn stale(&self) -> &Queue {
        &self.stale
    }

    /// A queue's nodes, coldest first. Stops after as many as there can be, also if the list is broken.
    pub fn iter(&self, queue: &Queue) -> impl Iterator<Item = NodeId> {
        let mut next = queue.list.front;
        let nodes = std::iter::from_fn(move || {
            let id = next.some()?;
            next = self.slots.0.get(id.index())?.links.warmer;
            Some(id)
        });
        nodes.take(self.slots.0.len())
    }

    /// Lets a test of the checker break a slot.
    #[cfg(test)]
    pub(crate) fn break_queue_length(&mut self, blocks: usize) {
        self.queues[0].blocks += blocks;
    }

    /// Lets a test of the checker break the links of a slot.
    #[cfg(test)]
    pub(crate) fn break_links(&mut self, id: NodeId, warmer: NodeId) {
        self.slots.0[id.index()].links.warmer = warmer;
    }
}

#[cfg(test)]
mod tests;
