//! Namespaces: bytes, or (kind, value) pairs, and their encoding (`docs/design/rules.md` 13).

use kvpager_core::config::NAME_BYTES_MAX;
use kvpager_core::namespace::{self, Namespace};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::arguments::Given;
use crate::errors::{config_error, shown};

/// Longest kind, in characters.
const KIND_MAX: usize = 64;

/// An encoded namespace. Fields are typed and length-prefixed, so that no two namespaces share an encoding (W8).
pub fn encode(py: Python<'_>, namespace: &Given<'_>) -> PyResult<Vec<u8>> {
    let mut encoded = Vec::new();
    match namespace.get() {
        None => encoded.push(0),
        Some(namespace) => {
            if let Ok(bytes) = namespace.cast::<PyBytes>() {
                encoded.push(0);
                encoded.extend_from_slice(bytes.as_bytes());
            } else if let Ok(pairs) = namespace.cast::<PyTuple>() {
                encoded.push(1);
                for pair in pairs {
                    encode_pair(&pair, &mut encoded)?;
                    check_len(py, &encoded)?;
                }
            } else {
                let kind = namespace.get_type().name()?;
                return Err(PyTypeError::new_err(format!(
                    "namespace must be bytes or a tuple of (kind, bytes) pairs, not {kind}"
                )));
            }
        }
    }
    check_len(py, &encoded)?;
    Ok(encoded)
}

fn check_len(py: Python<'_>, encoded: &[u8]) -> PyResult<()> {
    if encoded.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    let len = encoded.len();
    Err(config_error(py, format!("namespace must have at most {NAME_BYTES_MAX} bytes encoded, not {len} or more")))
}

fn encode_pair(pair: &Bound<'_, PyAny>, encoded: &mut Vec<u8>) -> PyResult<()> {
    let Some((kind, value)) = as_pair(pair) else {
        let shown = shown(pair)?;
        return Err(PyTypeError::new_err(format!(
            "namespace must hold (str, bytes) pairs, as ((\"tenant\", b\"a\"),) does, not {shown}"
        )));
    };
    // The text itself: `str()` of a subclass (an Enum, say) could run code and answer anything.
    let word = kind.to_str().unwrap_or_default();
    let is_word = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
    if word.is_empty() || word.len() > KIND_MAX || !is_word {
        let shown = shown(&kind)?;
        return Err(config_error(
            pair.py(),
            format!("a namespace kind must be 1 to {KIND_MAX} ASCII letters, digits, '_', '-' or '.', not {shown}"),
        ));
    }
    for field in [word.as_bytes(), value.as_bytes()] {
        encoded.extend_from_slice(&(field.len() as u32).to_le_bytes());
        encoded.extend_from_slice(field);
    }
    Ok(())
}

fn as_pair<'py>(pair: &Bound<'py, PyAny>) -> Option<(Bound<'py, PyString>, Bound<'py, PyBytes>)> {
    let pair = pair.cast::<PyTuple>().ok()?;
    if pair.len() != 2 {
        return None;
    }
    Some((pair.get_item(0).ok()?.cast_into().ok()?, pair.get_item(1).ok()?.cast_into().ok()?))
}

/// What the caller gave.
pub fn decode<'py>(py: Python<'py>, encoded: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    match namespace::decode(encoded) {
        Namespace::Bytes(name) => Ok(PyBytes::new(py, name).into_any()),
        Namespace::Pairs(pairs) => {
            let pairs = pairs.into_iter().map(|(kind, value)| (String::from_utf8_lossy(kind), PyBytes::new(py, value)));
            Ok(PyTuple::new(py, pairs.collect::<Vec<_>>())?.into_any())
        }
    }
}
