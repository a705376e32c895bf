//! A slab of boxed elements named by handles: a slot, and a serial number that is never used again (I10).

use crate::error::Result;
use crate::ids::Handle;

/// Elements by handle.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<(u64, Option<Box<T>>)>,
    free: Vec<u32>,
    next_serial: u64,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), next_serial: 0 }
    }
}

impl<T> Slab<T> {
    /// The serial that the next element gets.
    #[must_use]
    pub const fn next_serial(&self) -> u64 {
        self.next_serial
    }

    /// Makes room for `count` elements, so that adding them cannot fail.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn reserve(&mut self, count: usize) -> Result<()> {
        self.slots.try_reserve(count.saturating_sub(self.free.len()))?;
        let slots = self.slots.len() + count;
        self.free.try_reserve(slots.saturating_sub(self.free.len()))?;
        Ok(())
    }

    /// Adds an element; `reserve` made room.
    pub fn insert(&mut self, element: Box<T>) -> Handle {
        let serial = self.next_serial;
        self.next_serial += 1;
        let slot = if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = (serial, Some(element));
            slot
        } else {
            self.slots.push((serial, Some(element)));
            self.slots.len() as u32 - 1
        };
        Handle { slot, serial }
    }

    /// The element, unless it is gone.
    #[must_use]
    pub fn get(&self, handle: Handle) -> Option<&T> {
        match self.slots.get(handle.slot as usize) {
            Some((serial, Some(element))) if *serial == handle.serial => Some(element),
            _ => None,
        }
    }

    /// The element, unless it is gone.
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        match self.slots.get_mut(handle.slot as usize) {
            Some((serial, Some(element))) if *serial == handle.serial => Some(element),
            _ => None,
        }
    }

    /// Takes the element out for the length of a call; `put_back` ends that.
    pub fn take(&mut self, handle: Handle) -> Option<Box<T>> {
        match self.slots.get_mut(handle.slot as usize) {
            Some((serial, element)) if *serial == handle.serial => element.take(),
            _ => None,
        }
    }

    /// Ends `take`.
    pub fn put_back(&mut self, handle: Handle, element: Box<T>) {
        self.slots[handle.slot as usize] = (handle.serial, Some(element));
    }

    /// A new handle for what is put back in the place of an element that was taken out: the old one reaches nobody any more.
    pub const fn renew(&mut self, handle: Handle) -> Handle {
        let serial = self.next_serial;
        self.next_serial += 1;
        Handle { serial, ..handle }
    }

    /// The slot of an element that was taken out becomes free.
    pub fn retire(&mut self, handle: Handle) {
        self.free.push(handle.slot);
    }

    /// The handles of all elements, oldest first.
    #[must_use]
    pub fn handles(&self) -> Vec<Handle> {
        let present = self.slots.iter().enumerate().filter(|(_, (_, element))| element.is_some());
        let mut handles: Vec<Handle> =
            present.map(|(slot, (serial, _))| Handle { slot: slot as u32, serial: *serial }).collect();
        handles.sort_unstable_by_key(|handle| handle.serial);
        handles
    }

    /// All elements that are not taken out, to be changed, in no order that means anything.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|(_, element)| element.as_deref_mut())
    }

    /// All elements, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|(_, element)| element.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(slab: &mut Slab<&'static str>, element: &'static str) -> Handle {
        slab.reserve(1).unwrap();
        slab.insert(Box::new(element))
    }

    #[test]
    fn a_slot_is_used_again_and_a_serial_never() {
        let mut slab = Slab::default();
        let (a, b) = (insert(&mut slab, "a"), insert(&mut slab, "b"));
        assert_eq!(slab.take(a).as_deref(), Some(&"a"));
        slab.retire(a);
        let c = insert(&mut slab, "c");
        assert_eq!((c.slot, c.serial, slab.next_serial()), (a.slot, 2, 3));
        assert_eq!([slab.get(a), slab.get(b), slab.get(c)], [None, Some(&"b"), Some(&"c")]);
        assert!(slab.take(a).is_none(), "I10: a stale handle reaches nobody");
        assert_eq!(slab.iter().copied().collect::<Vec<_>>(), ["c", "b"]);
    }

    #[test]
    fn an_element_that_is_out_cannot_be_had_twice() {
        let mut slab = Slab::default();
        let a = insert(&mut slab, "a");
        let element = slab.take(a).unwrap();
        assert!(slab.get(a).is_none() && slab.take(a).is_none() && slab.iter().next().is_none());
        slab.put_back(a, element);
        assert_eq!(slab.get(a), Some(&"a"));
    }

    #[test]
    fn a_renewed_handle_has_the_slot_and_a_new_serial() {
        let mut slab = Slab::default();
        let (a, b) = (insert(&mut slab, "a"), insert(&mut slab, "b"));
        assert_eq!(slab.take(a).as_deref(), Some(&"a"));
        let c = slab.renew(a);
        slab.put_back(c, Box::new("c"));
        assert_eq!((c.slot, c.serial, slab.next_serial()), (a.slot, 2, 3));
        assert_eq!([slab.get(a), slab.get(b), slab.get(c)], [None, Some(&"b"), Some(&"c")]);
        assert!(slab.take(a).is_none(), "I10: a stale handle reaches nobody");
        assert_eq!(slab.handles(), [b, c]);
    }

    #[test]
    fn a_handle_from_elsewhere_reaches_nobody() {
        let mut slab = Slab::default();
        let a = insert(&mut slab, "a");
        for handle in [Handle { slot: 1, ..a }, Handle { serial: 1, ..a }, Handle { slot: u32::MAX, serial: u64::MAX }]
        {
            assert!(slab.get(handle).is_none() && slab.take(handle).is_none());
        }
    }

    #[test]
    fn room_for_an_element_is_room_for_its_retirement() {
        let mut slab = Slab::default();
        slab.reserve(100).unwrap();
        let capacity = (slab.slots.capacity(), slab.free.capacity());
        let handles: Vec<Handle> = (0..100).map(|_| slab.insert(Box::new("x"))).collect();
        for handle in handles {
            slab.take(handle);
            slab.retire(handle);
        }
        assert_eq!((slab.slots.capacity(), slab.free.capacity()), capacity);
    }
}
