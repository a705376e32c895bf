//! Memory that may be refused: large buffers are asked for, never assumed.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::error::{Error, Result};

/// A table whose growth can be refused (`try_reserve`), where that of an ordered map would end the process. Nothing is
/// decided by its order (I11).
pub type Table<Key, Value> = HashMap<Key, Value, BuildHasherDefault<DefaultHasher>>;

/// `len` zeros. The kernel gives the pages only when they are touched, so a table sized for the worst case costs what
/// is used of it.
///
/// # Errors
/// `Memory` if the allocator refuses.
pub fn zeroed<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    // `vec![0; n]` is the one safe way to lazily zeroed memory, but it aborts when refused. So ask first.
    Vec::<T>::new().try_reserve_exact(len)?;
    Ok(vec![T::default(); len])
}

/// An empty vector with room for exactly `capacity` elements.
///
/// # Errors
/// `Memory` if the allocator refuses.
pub fn with_capacity<T>(capacity: usize) -> Result<Vec<T>> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(capacity)?;
    Ok(vector)
}

/// Adds an element at the end.
///
/// # Errors
/// `Memory` if the allocator refuses.
pub fn push<T>(vector: &mut Vec<T>, element: T) -> Result<()> {
    vector.try_reserve(1)?;
    vector.push(element);
    Ok(())
}

/// Text that is written piece by piece. Where the allocator refuses, writing fails; nothing else makes it fail.
#[derive(Debug, Default)]
pub struct Text(pub String);

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.try_reserve(text.len()).map_err(|_| fmt::Error)?;
        self.0.push_str(text);
        Ok(())
    }
}

/// Only `Text` is written to here, which fails for want of memory alone.
impl From<fmt::Error> for Error {
    fn from(_: fmt::Error) -> Self {
        Self::Memory
    }
}
