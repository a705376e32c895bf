//! Memory that may be refused: large buffers are asked for, never assumed.

use crate::error::Result;

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
