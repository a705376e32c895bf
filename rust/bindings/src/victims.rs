//! Who gives way: arguments and answers of `choose_victims`, and the log.

use std::sync::Arc;

use kvpager_core::Error;
use kvpager_core::ids::Handle;
use kvpager_core::memory::with_capacity;
use kvpager_core::pager::{Asked, RecoveryCost, VictimPolicy};
use kvpager_core::preemptions::Preemption;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple, PyType};

use crate::arguments::{self, items, items_of, number, within, wrong_type};
use crate::errors::shown;
use crate::sequence::PySequence;
use crate::shared::Shared;

const NUMBER_MAX: i64 = (1 << 31) - 1;
const COST_FIELDS: [&str; 6] = ["token", "pair", "cached_token", "block", "least", "row_step"];
const A_COST: &str = "a RecoveryCost, as CostModel.recovery_cost() answers";

/// The arguments as given.
pub struct Given<'a, 'py> {
    pub needed: &'a arguments::Given<'py>,
    pub policy: &'a arguments::Given<'py>,
    pub candidates: Option<&'a Bound<'py, PyAny>>,
    pub priorities: Option<&'a Bound<'py, PyAny>>,
    pub cost: Option<&'a Bound<'py, PyAny>>,
    pub spare_after: &'a arguments::Given<'py>,
    pub keep: &'a arguments::Given<'py>,
    pub left_out: &'a arguments::Given<'py>,
    pub finishing: Option<&'a Bound<'py, PyAny>>,
}

impl<'py> Given<'_, 'py> {
    /// The answer.
    pub fn choose(&self, py: Python<'py>, shared: &Arc<Shared>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let sequences = self.candidates.map(|given| items(given, "candidates")).transpose()?;
        let (asked, is_ours) = self.asked(shared, sequences.as_ref())?;
        let victims = shared.read(py, |pager| {
            for (handle, is_ours) in asked.candidates.iter().flatten().zip(is_ours) {
                if !is_ours {
                    let message = format!("sequence {} belongs to another pager", handle.serial);
                    return Err(Error::Value(message));
                }
                pager.running(*handle, "choose_victims")?;
            }
            pager.choose_victims(&asked)
        })?;
        let class = CLASS.import(py, "kvpager.types", "Victim")?;
        let told = victims.into_iter().map(|victim| {
            let sequence = sequences.as_ref().map(|sequences| sequences.get_item(victim.place)).transpose()?;
            let (id, place, action) = (victim.handle.serial, victim.place, victim.action.name());
            class.call1((id, sequence, place, action, victim.blocks, victim.tokens, victim.cost, victim.reason))
        });
        told.collect()
    }

    /// Types and values, in the order of the arguments; and which candidates are this pager's.
    fn asked(&self, shared: &Arc<Shared>, sequences: Option<&Bound<'py, PyTuple>>) -> PyResult<(Asked, Vec<bool>)> {
        let needed = integer(self.needed, "needed_blocks", 0, 0)?;
        let policy = self.policy()?;
        let (mut handles, mut is_ours): (Vec<Handle>, Vec<bool>) = (Vec::new(), Vec::new());
        for sequence in sequences.into_iter().flatten() {
            let Ok(sequence) = sequence.cast::<PySequence>() else {
                return Err(wrong_type(&sequence, "candidates", "Sequences"));
            };
            let (handle, ours) = sequence.get().handle_of(shared);
            handles.push(handle);
            is_ours.push(ours);
        }
        let count = handles.len();
        let one_each = |name: &str, found: usize| {
            if sequences.is_none() || found != count {
                return Err(PyValueError::new_err(format!(
                    "{name} needs a value for each candidate: there are {count}, not {found}"
                )));
            }
            Ok(())
        };
        let mut priorities = Vec::new();
        if let Some(given) = self.priorities {
            for priority in items(given, "priorities")? {
                priorities.push(within(&priority, "a priority", -NUMBER_MAX - 1, NUMBER_MAX)?);
            }
            one_each("priorities", priorities.len())?;
        }
        if self.priorities.is_some() != (policy == VictimPolicy::Priority) {
            return Err(PyValueError::new_err("the policy priority takes priorities, and no other does"));
        }
        let cost = self.cost.map_or_else(|| Ok(RecoveryCost::default()), cost)?;
        let spare_after = integer(self.spare_after, "spare_after", 1, 2)? as u64;
        let keep = integer(self.keep, "keep", 0, 1)?;
        let mut left_out: Vec<usize> = Vec::new();
        if let Some(given) = self.left_out.get() {
            for place in items(given, "left_out")? {
                left_out.push(usize::try_from(within(&place, "left_out", 0, NUMBER_MAX)?).unwrap_or(usize::MAX));
            }
        }
        let mut places = left_out.clone();
        places.sort_unstable();
        if places.last().is_some_and(|&last| last >= count) || places.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(PyValueError::new_err(format!(
                "left_out must name positions of the {count} candidates, each once"
            )));
        }
        let mut finishing = Vec::new();
        if let Some(given) = self.finishing {
            for end in items(given, "finishing")? {
                let end = if end.is_none() { None } else { Some(within(&end, "finishing", 0, NUMBER_MAX)?) };
                finishing.push(end.map(i64::cast_unsigned));
            }
            one_each("finishing", finishing.len())?;
        }
        let candidates = sequences.map(|_| handles);
        let asked = Asked { needed, policy, candidates, priorities, cost, spare_after, keep, left_out, finishing };
        Ok((asked, is_ours))
    }

    fn policy(&self) -> PyResult<VictimPolicy> {
        let Some(value) = self.policy.get() else { return Ok(VictimPolicy::Newest) };
        let Ok(name) = value.cast::<PyString>() else { return Err(wrong_type(value, "policy", "a str")) };
        if let Some(policy) = name.to_str().ok().and_then(VictimPolicy::from_name) {
            return Ok(policy);
        }
        let names = VictimPolicy::NAMES;
        Err(PyValueError::new_err(format!("policy is {}; it must be one of {names}", shown(value)?)))
    }
}

fn integer(given: &arguments::Given<'_>, name: &str, least: i64, default: usize) -> PyResult<usize> {
    let Some(value) = given.get() else { return Ok(default) };
    Ok(usize::try_from(within(value, name, least, NUMBER_MAX)?).unwrap_or(default))
}

fn cost(given: &Bound<'_, PyAny>) -> PyResult<RecoveryCost> {
    let mut numbers: Vec<f64> = Vec::new();
    for value in items_of(given, "cost", A_COST)? {
        numbers.push(number(&value, "cost")?.unwrap_or(f64::INFINITY));
    }
    let &[token, pair, cached_token, block, least, row_step] = &numbers[..] else {
        let message = format!("cost has {} numbers; a RecoveryCost has {}", numbers.len(), COST_FIELDS.len());
        return Err(PyValueError::new_err(message));
    };
    for (name, &number) in COST_FIELDS.iter().zip(&numbers) {
        if number.is_nan() || number < 0.0 || (number.is_infinite() && *name != "block") {
            let message = format!("{name} of the cost is {number}; it must be a finite number, 0 or more");
            return Err(PyValueError::new_err(message));
        }
    }
    Ok(RecoveryCost { token, pair, cached_token, block, least, row_step })
}

/// What the log has.
pub fn preemptions<'py>(py: Python<'py>, shared: &Arc<Shared>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let entries = shared.read(py, |pager| {
        let log = pager.preemptions();
        let mut entries: Vec<Preemption> = with_capacity(log.len())?;
        entries.extend(log.cloned());
        Ok(entries)
    })?;
    let class = CLASS.import(py, "kvpager.types", "Preemption")?;
    let told = entries.into_iter().map(|entry| {
        let Preemption { number, tick, sequence, action, blocks, tokens, why } = entry;
        class.call1((number, tick, sequence, action.name(), blocks, tokens, why.cost, why.reason))
    });
    told.collect()
}
