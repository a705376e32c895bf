//! One lock around one pager, shared by the Python pager and its sequences.
//!
//! - `try_lock` while attached to the interpreter costs a few nanoseconds; only if another thread has the lock does
//!   this one detach to wait (L9: else a thread that waits for the interpreter while it holds the lock would never
//!   get it).
//! - A destructor takes no lock. It queues its handle; the next call that changes anything releases the queued ones
//!   first.
//! - A panic in the core is caught here, poisons the lock, and every later call says so.
//! - A child of `os.fork()` has a copy of a lock that nobody may ever open: its use is refused before the lock is
//!   touched.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use kvpager_core::ids::{Handle, Token};
use kvpager_core::{Error, Pager};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::errors;
use crate::tokens::Tokens;

/// Forks that this process descends from since the extension was loaded.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// This process is a child now.
pub fn mark_forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How many forks lie between this process and the one that loaded the extension.
pub fn forks() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// What the garbage collector took.
pub enum Dropped {
    /// A live sequence's handle.
    Sequence(Handle),
    /// A batch.
    Batch(Handle),
}

/// A pager, its lock, and the handles that were dropped.
pub struct Shared {
    guarded: Mutex<Guarded>,
    forks: u64,
    dropped: Sender<Dropped>,
    num_dropped: AtomicUsize,
    /// Sequences that a batch released, until their handles have asked.
    released: Mutex<Serials>,
    num_released: AtomicUsize,
}

/// Numbers of sequences. The pager gives them, one after the other: no caller can choose some that collide.
type Serials = HashSet<u64, BuildHasherDefault<SerialHasher>>;

#[derive(Default)]
struct SerialHasher(u64);

impl Hasher for SerialHasher {
    fn write_u64(&mut self, serial: u64) {
        // Low bits stay as different as they are, and high ones become so.
        self.0 = serial.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a serial is one u64");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

struct Guarded {
    pager: Pager,
    dropped: Receiver<Dropped>,
}

impl Shared {
    pub fn new(pager: Pager) -> Self {
        let (sender, receiver) = channel();
        Self {
            guarded: Mutex::new(Guarded { pager, dropped: receiver }),
            forks: forks(),
            dropped: sender,
            num_dropped: AtomicUsize::new(0),
            released: Mutex::new(Serials::default()),
            num_released: AtomicUsize::new(0),
        }
    }

    /// A call that changes nothing.
    pub fn read<R>(&self, py: Python<'_>, call: impl FnOnce(&Pager) -> Result<R, Error>) -> PyResult<R> {
        self.run(py, |guarded| call(&guarded.pager))
    }

    /// A call that changes nothing that shows: rows of batches may bring home what they keep of their sequences.
    pub fn look<R>(&self, py: Python<'_>, call: impl FnOnce(&mut Pager) -> Result<R, Error>) -> PyResult<R> {
        self.run(py, |guarded| call(&mut guarded.pager))
    }

    /// A call that may change the pager. Dropped handles are released first, in the order in which they were dropped.
    pub fn change<R>(&self, py: Python<'_>, call: impl FnOnce(&mut Pager) -> Result<R, Error>) -> PyResult<R> {
        self.run(py, |guarded| {
            if self.num_dropped.load(Ordering::Acquire) > 0 {
                while let Ok(dropped) = guarded.dropped.try_recv() {
                    self.num_dropped.fetch_sub(1, Ordering::Relaxed);
                    match dropped {
                        Dropped::Sequence(handle) => guarded.pager.release_dropped(handle),
                        Dropped::Batch(handle) => guarded.pager.close_batch(handle),
                    }
                }
            }
            call(&mut guarded.pager)
        })
    }

    /// The arguments of a call that may change the pager. One that they keep from being made still releases the handles
    /// that were dropped before it.
    pub fn arguments<T>(&self, py: Python<'_>, arguments: PyResult<T>) -> PyResult<T> {
        arguments.or_else(|error| {
            self.change(py, |_| Ok(()))?;
            Err(error)
        })
    }

    /// `change` with tokens: an error names them as the caller gave them.
    pub fn change_with<R>(
        &self,
        py: Python<'_>,
        tokens: &Tokens,
        call: impl FnOnce(&mut Pager, &[Token]) -> Result<R, Error>,
    ) -> PyResult<R> {
        self.change(py, |pager| Ok(call(pager, tokens.as_slice(py))))?.map_err(|error| tokens.explain(py, error))
    }

    /// `read` with tokens.
    pub fn read_with<R>(
        &self,
        py: Python<'_>,
        tokens: &Tokens,
        call: impl FnOnce(&Pager, &[Token]) -> Result<R, Error>,
    ) -> PyResult<R> {
        self.read(py, |pager| Ok(call(pager, tokens.as_slice(py))))?.map_err(|error| tokens.explain(py, error))
    }

    /// Queues what nobody can release any more.
    pub fn queue_dropped(&self, dropped: Dropped) {
        // The receiver lives as long as this sender, so that this cannot fail.
        if self.dropped.send(dropped).is_ok() {
            self.num_dropped.fetch_add(1, Ordering::Release);
        }
    }

    /// Asks for the memory that `note_released` uses for so many sequences.
    ///
    /// # Errors
    /// `Memory`.
    pub fn expect_released(&self, count: usize) -> Result<(), Error> {
        Ok(self.released().try_reserve(count)?)
    }

    /// Sequences were released by another call than that of their own handle.
    pub fn note_released(&self, sequences: &[Handle]) {
        let mut released = self.released();
        released.extend(sequences.iter().map(|sequence| sequence.serial));
        self.num_released.store(released.len(), Ordering::Release);
    }

    /// Was this sequence released like that? It is told once.
    pub fn was_released(&self, sequence: Handle) -> bool {
        // A destructor asks: it must not touch the lock of a forked process. Nobody who has it waits or runs Python.
        if self.num_released.load(Ordering::Acquire) == 0 || self.is_forked() {
            return false;
        }
        let mut released = self.released();
        let is_released = released.remove(&sequence.serial);
        self.num_released.store(released.len(), Ordering::Release);
        is_released
    }

    fn released(&self) -> MutexGuard<'_, Serials> {
        self.released.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    /// Keeps the lock while other threads run Python: no call does, so the path of those that wait needs help to be
    /// tested.
    pub fn hold_for_tests(&self, py: Python<'_>, time: std::time::Duration) -> PyResult<()> {
        let _guard = self.lock(py)?;
        // A guard must not change threads, and does not: the closure only sleeps, on this one.
        py.detach(|| std::thread::sleep(time));
        Ok(())
    }

    fn run<R>(&self, py: Python<'_>, call: impl FnOnce(&mut Guarded) -> Result<R, Error>) -> PyResult<R> {
        let guard = self.lock(py)?;
        let result = catch_unwind(AssertUnwindSafe(move || {
            // The guard is dropped while unwinding, which poisons the lock.
            let mut guard = guard;
            call(&mut guard)
        }));
        match result {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(errors::to_python(py, error)),
            Err(_) => Err(errors::poisoned(py)),
        }
    }

    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Guarded>> {
        if self.is_forked() {
            return Err(errors::forked(py));
        }
        match self.guarded.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(_)) => Err(errors::poisoned(py)),
            Err(TryLockError::WouldBlock) => self.guarded.lock_py_attached(py).map_err(|_| errors::poisoned(py)),
        }
    }
}

/// None in the place of `OutOfBlocks`.
pub fn none_if_full<R>(result: Result<R, Error>) -> Result<Option<R>, Error> {
    match result {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::OutOfBlocks { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
