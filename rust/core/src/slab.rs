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

    /// Takes the element out for the length of a call; `put_back` ends that.
    pub fn take(&mut self, handle: Handle) -> Option<Box<T>> {
        match self.slots.get_mut(handle.slot as usize) {
            Some((serial, element)) if *serial == handle.serial => element.take(),
            _ => None,
        }
    }

    /// Ends `take`.
    pub fn put_back(&mut self, handle: Handle, element: Box<T>) {
        self.slots[handle.slot as usize].1 = Some(element);
    }

    /// The slot of an element that was taken out becomes free.
    pub fn retire(&mut self, handle: Handle) {
        self.free.push(handle.slot);
    }

    /// All elements, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|(_, element)| element.as_deref())
    }
}
