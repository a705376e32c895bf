//! `kvpager._core.Replay`: replays of id traces, without a Python call for each request.

use std::sync::Mutex;

use kvpager_core::ids::Token;
use kvpager_core::replay::{Replay, Trace};
use kvpager_core::{Error, PolicyKind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;

/// Drives a pager with a trace whose prompts are chains of block ids. `kvpager.replay` builds the columns: `ids`
/// int32 (all chains, without their private blocks), `offsets` int64 [n + 1], `prompt_blocks` int32 [n], `arrivals_s`
/// and `service_s` float64 [n] or both None.
#[pyclass(frozen, name = "Replay", module = "kvpager._core")]
pub struct PyReplay {
    replay: Mutex<Replay>,
}

type Column<'py, T> = PyReadonlyArray1<'py, T>;

#[pymethods]
impl PyReplay {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "columns")]
    fn new(
        py: Python<'_>,
        ids: Column<'_, i32>,
        offsets: Column<'_, i64>,
        prompt_blocks: Column<'_, i32>,
        arrivals_s: Option<Column<'_, f64>>,
        service_s: Option<Column<'_, f64>>,
        num_blocks: usize,
        policy: &str,
    ) -> PyResult<Self> {
        let to_python = |error| errors::to_python(py, error);
        let negative = || to_python(Error::Value("offsets and prompt_blocks must not be negative".to_owned()));
        let times = match (arrivals_s, service_s) {
            (None, None) => None,
            (Some(arrivals), Some(service)) if arrivals.as_array().len() == service.as_array().len() => {
                Some(arrivals.as_array().iter().copied().zip(service.as_array().iter().copied()).collect())
            }
            _ => {
                return Err(to_python(Error::Value(
                    "arrivals_s and service_s must both be given, of one length, or both be None".to_owned(),
                )));
            }
        };
        let trace = Trace {
            ids: ids.as_array().iter().map(|id| id.cast_unsigned()).collect::<Vec<Token>>(),
            offsets: offsets
                .as_array()
                .iter()
                .map(|&offset| usize::try_from(offset))
                .collect::<Result<_, _>>()
                .map_err(|_| negative())?,
            prompt_blocks: prompt_blocks
                .as_array()
                .iter()
                .map(|&blocks| u32::try_from(blocks))
                .collect::<Result<_, _>>()
                .map_err(|_| negative())?,
            times,
        };
        let policy = PolicyKind::from_name(policy).map_err(to_python)?;
        Ok(Self { replay: Mutex::new(Replay::new(trace, num_blocks, policy).map_err(to_python)?) })
    }

    /// Serve up to `num_requests` more; returns how many have been served in all. NeverFits for a request larger
    /// than the pool.
    fn advance(&self, py: Python<'_>, num_requests: usize) -> PyResult<usize> {
        py.detach(|| self.replay.lock().ok().map(|mut replay| replay.advance(num_requests)))
            .ok_or_else(|| errors::poisoned(py))?
            .map_err(|error| errors::to_python(py, error))
    }

    /// What has been counted so far: requests, `prompt_blocks`, `hit_blocks`, `evicted_blocks`, `cached_blocks`,
    /// `active_blocks_max`.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let totals =
            py.detach(|| self.replay.lock().ok().map(|replay| replay.totals())).ok_or_else(|| errors::poisoned(py))?;
        let result = PyDict::new(py);
        result.set_item("requests", totals.requests)?;
        result.set_item("prompt_blocks", totals.prompt_blocks)?;
        result.set_item("hit_blocks", totals.hit_blocks)?;
        result.set_item("evicted_blocks", totals.evicted_blocks)?;
        result.set_item("cached_blocks", totals.cached_blocks)?;
        result.set_item("active_blocks_max", totals.active_blocks_max)?;
        Ok(result)
    }
}
