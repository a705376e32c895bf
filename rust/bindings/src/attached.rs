//! Tiers that have to drop what a pager drops. `docs/design/rules.md` 17.5.

use std::sync::Mutex;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use crate::arguments::wrong_type;

/// The tiers that are attached to a pager. Weak, as they hold the pager.
#[derive(Default)]
pub struct Attached(Mutex<Vec<Py<PyWeakrefReference>>>);

impl Attached {
    /// Adds one.
    pub fn add(&self, tier: &Bound<'_, PyAny>) -> PyResult<()> {
        for method in ["on_reset", "on_forget"] {
            if !tier.hasattr(method)? {
                return Err(wrong_type(tier, "tier", "an object with the methods on_reset and on_forget"));
            }
        }
        let tier = PyWeakrefReference::new(tier)?.unbind();
        if let Ok(mut attached) = self.0.lock() {
            attached.push(tier);
        }
        Ok(())
    }

    /// Those that there still are, held up until the answer goes: what a tier brought between a change of the pager and
    /// its own would be what both were to drop.
    pub fn held<'py>(&self, py: Python<'py>) -> PyResult<Held<'py>> {
        let tiers: Vec<Bound<'py, PyAny>> = {
            let Ok(mut attached) = self.0.lock() else { return Ok(Held::default()) };
            attached.retain(|tier| tier.bind(py).upgrade().is_some());
            attached.iter().filter_map(|tier| tier.bind(py).upgrade()).collect()
        };
        let mut held = Held { tiers, locks: Vec::new() };
        for tier in &held.tiers {
            if let Some(lock) = tier.getattr_opt(intern!(py, "lock"))? {
                lock.call_method0(intern!(py, "acquire"))?;
                held.locks.push(lock);
            }
        }
        Ok(held)
    }
}

/// Attached tiers, and those of their locks that are taken.
#[derive(Default)]
pub struct Held<'py> {
    tiers: Vec<Bound<'py, PyAny>>,
    locks: Vec<Bound<'py, PyAny>>,
}

impl<'py> Held<'py> {
    /// Tells each of them, whatever another raises. The first error comes through, and who raised one is `stale`: no code
    /// of Python's runs in between, where an interrupt could fall.
    pub fn tell(&self, call: impl Fn(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>) -> PyResult<()> {
        let mut outcome = Ok(());
        for tier in &self.tiers {
            if let Err(error) = call(tier) {
                let py = tier.py();
                if tier.hasattr(intern!(py, "stale")).unwrap_or(false) {
                    // It has the attribute, so this is refused by nothing but its own will.
                    let _ = tier.setattr(intern!(py, "stale"), error.value(py));
                }
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for lock in self.locks.drain(..).rev() {
            if let Err(error) = lock.call_method0(intern!(lock.py(), "release")) {
                error.write_unraisable(lock.py(), Some(&lock));
            }
        }
    }
}
