//! A global allocator that counts what the thread at hand asks for, and refuses on demand. A test program that wants it says so:
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: Allocator = Allocator;
//! ```
//!
//! The library itself holds no `unsafe` (I14). A global allocator cannot be written without, and this one is in test programs only.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    /// Calls that still succeed before one is refused; none: all succeed.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// Requests of any kind that still succeed before all are refused; none: all succeed.
    static UNTIL: Cell<Option<usize>> = const { Cell::new(None) };
    static WAS_REFUSED: Cell<bool> = const { Cell::new(false) };
    /// Larger requests are refused.
    static BYTES_MAX: Cell<usize> = const { Cell::new(usize::MAX) };
}

#[derive(Debug)]
pub struct Allocator;

/// Allocations since `measure` began, and what is left of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measured {
    /// Calls of the allocator that asked for memory.
    pub calls: usize,
    /// Bytes that are live now and were not before; negative if more was given back.
    pub live_bytes: isize,
    /// The largest single request.
    pub largest_bytes: usize,
}

/// Runs `work` and counts what it allocates on this thread.
pub fn measure<R>(work: impl FnOnce() -> R) -> (R, Measured) {
    let (calls, live_bytes) = (CALLS.get(), LIVE_BYTES.get());
    LARGEST.set(0);
    let result = work();
    let measured = Measured {
        calls: CALLS.get() - calls,
        live_bytes: LIVE_BYTES.get() - live_bytes,
        largest_bytes: LARGEST.get(),
    };
    (result, measured)
}

/// Runs `work`; the allocator refuses its request number `nth` (from 0) among those that can be refused. Answers whether it came to that.
pub fn refuse_nth<R>(nth: usize, work: impl FnOnce() -> R) -> (R, bool) {
    LEFT.set(Some(nth));
    let result = work();
    let was_refused = LEFT.take().is_none();
    (result, was_refused)
}

/// Runs `work`; the allocator refuses all requests, small and large, from number `nth` (from 0) on. Answers whether it came to that.
pub fn refuse_from<R>(nth: usize, work: impl FnOnce() -> R) -> (R, bool) {
    UNTIL.set(Some(nth));
    WAS_REFUSED.set(false);
    let result = work();
    UNTIL.set(None);
    (result, WAS_REFUSED.get())
}

/// Runs `work`; the allocator refuses every request of more than `bytes`.
pub fn refuse_above<R>(bytes: usize, work: impl FnOnce() -> R) -> R {
    BYTES_MAX.set(bytes);
    let result = work();
    BYTES_MAX.set(usize::MAX);
    result
}

/// Only what can be refused without ending the process is refused: the core's buffers of words, whatever their size, and larger ones of
/// wider elements. Nodes of ordered maps and the box of a sequence (all below 384 bytes) abort in the standard library.
fn is_refusable(layout: Layout) -> bool {
    layout.align() == 4 || (layout.align() > 4 && layout.size() > 384)
}

impl Allocator {
    fn count(layout: Layout) -> bool {
        if layout.size() > BYTES_MAX.get() {
            return false;
        }
        match UNTIL.get() {
            Some(0) => {
                WAS_REFUSED.set(true);
                return false;
            }
            Some(left) => UNTIL.set(Some(left - 1)),
            None => {}
        }
        if is_refusable(layout) {
            match LEFT.get() {
                Some(0) => {
                    LEFT.set(None);
                    return false;
                }
                Some(left) => LEFT.set(Some(left - 1)),
                None => {}
            }
        }
        CALLS.set(CALLS.get() + 1);
        LIVE_BYTES.set(LIVE_BYTES.get() + layout.size() as isize);
        LARGEST.set(LARGEST.get().max(layout.size()));
        true
    }
}

// SAFETY: every call is passed on to the system's allocator as it is, or answered with null, which means refused.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if Self::count(layout) { unsafe { System.alloc(layout) } } else { std::ptr::null_mut() }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if Self::count(layout) { unsafe { System.alloc_zeroed(layout) } } else { std::ptr::null_mut() }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.set(LIVE_BYTES.get() - layout.size() as isize);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return std::ptr::null_mut() };
        if !Self::count(wanted) {
            return std::ptr::null_mut();
        }
        LIVE_BYTES.set(LIVE_BYTES.get() - layout.size() as isize);
        unsafe { System.realloc(pointer, layout, size) }
    }
}
