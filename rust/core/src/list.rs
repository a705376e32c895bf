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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    struct Slots(Vec<Links>);

    impl Linked for Slots {
        fn links(&mut self, id: NodeId) -> &mut Links {
            &mut self.0[id.index()]
        }
    }

    /// The list's elements, read in both directions.
    fn elements(list: List, slots: &Slots) -> Vec<u32> {
        let (mut forth, mut back) = (Vec::new(), VecDeque::new());
        let mut next = list.front;
        while let Some(id) = next.some() {
            forth.push(id.word());
            next = slots.0[id.index()].warmer;
        }
        next = list.back;
        while let Some(id) = next.some() {
            back.push_front(id.word());
            next = slots.0[id.index()].colder;
        }
        assert_eq!(back, forth);
        forth
    }

    proptest! {
        /// Three lists over one array of links; a slot is in one at a time.
        #[test]
        fn lists_are_as_vectors_are(steps in proptest::collection::vec((0..4_u8, 0..12_u32, 0..3_usize, 0..3_usize), 0..80)) {
            let mut slots = Slots(vec![Links::NONE; 12]);
            let mut lists = [List::EMPTY; 3];
            let mut vectors: [Vec<u32>; 3] = Default::default();
            for (kind, element, one, other) in steps {
                let id = NodeId::node(element);
                let home = vectors.iter().position(|vector| vector.contains(&element));
                match (kind, home) {
                    (0, None) => {
                        lists[one].push_back(&mut slots, id);
                        vectors[one].push(element);
                    }
                    (1, None) if !vectors[one].is_empty() => {
                        let at = element as usize % vectors[one].len();
                        lists[one].insert_after(&mut slots, NodeId::node(vectors[one][at]), id);
                        vectors[one].insert(at + 1, element);
                    }
                    (2, Some(home)) => {
                        lists[home].remove(&mut slots, id);
                        vectors[home].retain(|&kept| kept != element);
                    }
                    (3, _) if one != other => {
                        let mut moved = std::mem::replace(&mut lists[other], List::EMPTY);
                        lists[one].append(&mut slots, &mut moved);
                        lists[other] = moved;
                        let moved = std::mem::take(&mut vectors[other]);
                        vectors[one].extend(moved);
                    }
                    _ => {}
                }
                for (list, vector) in lists.iter().zip(&vectors) {
                    prop_assert_eq!(&elements(*list, &slots), vector);
                }
            }
        }
    }
}
