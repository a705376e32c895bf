//! Core errors as Python exceptions. The classes live in `kvpager.errors`, where Python can pickle and document them.

use std::fmt::Display;

use kvpager_core::Error;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt, PyModule, PyString};

/// An exception of `kvpager.errors`. If even that fails, the failure is the exception.
fn raise<'py>(py: Python<'py>, class: &str, arguments: impl pyo3::call::PyCallArgs<'py>) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let built = MODULE
        .get_or_try_init(py, || PyModule::import(py, "kvpager.errors").map(Bound::unbind))
        .and_then(|module| module.bind(py).getattr(class))
        .and_then(|class| class.call1(arguments));
    built.map_or_else(|error| error, PyErr::from_value)
}

/// The exception for a refused call of the core.
pub fn to_python(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::OutOfBlocks { needed, free, evictable, total, rows, reserve, tier } => {
            raise(py, "OutOfBlocks", (needed, free, evictable, total, rows.into_vec(), reserve, tier.name()))
        }
        Error::NeverFits { needed, usable } => raise(py, "NeverFits", (needed, usable)),
        Error::Stale { sequence, state, call } => raise(py, "StaleHandle", (sequence, state, call)),
        Error::Token { position, value } => {
            let value = value.cast_signed();
            raise(py, "TokenError", (token_message(position, &value), position, value))
        }
        Error::EmptyPrompt => raise(py, "TokenError", ("the prompt is empty: it needs at least one token",)),
        Error::Step(message) => step_error(py, message),
        Error::Transfer(message) => raise(py, "TransferError", (message,)),
        Error::Config(message) => config_error(py, message),
        Error::Value(message) => PyValueError::new_err(message),
        Error::Memory => allocation_error(py),
    }
}

/// The exception for a refused call of a store.
pub fn of_store(py: Python<'_>, error: kvpager_store::Error) -> PyErr {
    use kvpager_store::Error;
    match error {
        Error::Config(message) => config_error(py, message),
        Error::Io(message) | Error::Closed(message) => raise(py, "TransferError", (message,)),
        Error::Poisoned => poisoned(py),
    }
}

/// A step out of order.
pub fn step_error(py: Python<'_>, message: String) -> PyErr {
    raise(py, "StepError", (message,))
}

/// A setting outside its limits.
pub fn config_error(py: Python<'_>, message: String) -> PyErr {
    raise(py, "ConfigError", (message,))
}

/// A value as a message shows it: not all of a long one, and something of one that cannot be shown. What is no plain
/// failure of its repr, a `KeyboardInterrupt` above all, is not lost to the message.
pub fn shown(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.repr() {
        Ok(repr) => Ok(repr.to_string_lossy().chars().take(80).collect()),
        Err(error) if error.is_instance_of::<PyException>(value.py()) => {
            Ok(format!("a value of type {} that has no repr", value.get_type().name()?))
        }
        Err(error) => Err(error),
    }
}

/// What is wrong with a token at a position.
pub fn token_message(position: usize, value: &dyn Display) -> String {
    format!("token at position {position} must be 0 to 2147483647, not {value}")
}

/// A token with a value that none may have.
pub fn token_error(
    py: Python<'_>,
    message: String,
    position: Option<usize>,
    value: Option<&Bound<'_, PyAny>>,
) -> PyErr {
    raise(py, "TokenError", (message, position, value))
}

/// Tokens of a type that is never accepted. Only plain values travel with the error: it must survive pickling.
pub fn token_type_error(
    py: Python<'_>,
    message: String,
    position: Option<usize>,
    value: Option<&Bound<'_, PyAny>>,
) -> PyErr {
    match value.map(plain).transpose() {
        Ok(plain) => raise(py, "TokenTypeError", (message, position, plain)),
        Err(error) => error,
    }
}

/// A value itself, if any process can unpickle it; else what a message shows of it.
fn plain<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let is_plain = value.is_none()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyFloat>()
        || value.is_exact_instance_of::<PyString>();
    Ok(if is_plain { value.clone() } else { PyString::new(value.py(), &shown(value)?).into_any() })
}

/// The machine refused memory.
pub fn allocation_error(py: Python<'_>) -> PyErr {
    raise(py, "AllocationError", ("the machine refused memory for the pager's tables: nothing was changed",))
}

/// The machine refused memory for a plan that a call has made.
pub fn lost_plan(py: Python<'_>) -> PyErr {
    let message = "the machine refused memory to tell of the plan that this call has made: Pager.plans() has it";
    raise(py, "AllocationError", (message,))
}

/// An earlier call hit a bug.
pub fn poisoned(py: Python<'_>) -> PyErr {
    raise(py, "Poisoned", ())
}

/// Used in the child of `os.fork()`.
pub fn forked(py: Python<'_>) -> PyErr {
    raise(py, "ForkedProcess", ())
}
