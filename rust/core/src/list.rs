//! Doubly linked lists through slots that belong to somebody else: several lists share one array of links, a slot is
//! in one at a time.

use crate::ids::NodeId;

/// Neighbours of an element in its list.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    /// Towards the front (the cold end).
    pub colder: NodeId,
    /// Towards the back (the recent end).
    pub warmer: NodeId,
}

impl Links {
    /// In no list.
    pub const NONE: Self = Self { colder: NodeId::NONE, warmer: NodeId::NONE };
}

/// Slots with links in them.
pub trait Linked {
    /// The links of an element.
    fn links(&mut self, id: NodeId) -> &mut Links;
}

/// A list's two ends.
#[derive(Clone, Copy, Debug)]
pub struct List {
    /// The cold end.
    pub front: NodeId,
    /// The recent end.
    pub back: NodeId,
}

impl List {
    /// A list of nothing.
    pub const EMPTY: Self = Self { front: NodeId::NONE, back: NodeId::NONE };

    /// Adds an element at the recent end.
    pub fn push_back(&mut self, slots: &mut impl Linked, id: NodeId) {
        *slots.links(id) = Links { colder: self.back, warmer: NodeId::NONE };
        match self.back.some() {
            Some(back) => slots.links(back).warmer = id,
            None => self.front = id,
        }
        self.back = id;
    }

    /// Adds an element right behind another, on its warmer side.
    pub fn insert_after(&mut self, slots: &mut impl Linked, at: NodeId, id: NodeId) {
        let warmer = slots.links(at).warmer;
        *slots.links(id) = Links { colder: at, warmer };
        slots.links(at).warmer = id;
        match warmer.some() {
            Some(warmer) => slots.links(warmer).colder = id,
            None => self.back = id,
        }
    }

    /// Takes an element out.
    pub fn remove(&mut self, slots: &mut impl Linked, id: NodeId) {
        let Links { colder, warmer } = *slots.links(id);
        match colder.some() {
            Some(colder) => slots.links(colder).warmer = warmer,
            None => self.front = warmer,
        }
        match warmer.some() {
            Some(warmer) => slots.links(warmer).colder = colder,
            None => self.back = colder,
        }
        *slots.links(id) = Links::NONE;
    }

    /// Moves all of another list behind this one's recent end, in O(1).
    pub fn append(&mut self, slots: &mut impl Linked, other: &mut Self) {
        match (self.back.some(), other.front.some()) {
            (_, None) => return,
            (None, Some(_)) => *self = *other,
            (Some(back), Some(front)) => {
                slots.links(back).warmer = front;
                slots.links(front).colder = back;
                self.back = other.back;
            }
        }
        *other = Self::EMPTY;
    }
}
