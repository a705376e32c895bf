//! Ids, tokens and namespaces as the drawing writes them.

use std::fmt::{self, Write};

use crate::ids::{BlockId, Token};
use crate::namespace::{self, Namespace};

/// Tokens that a line of the tree shows.
const TOKENS_SHOWN: usize = 4;

/// Ids in order, ascending neighbours joined: `4-6 9 2`.
pub(super) fn write_ranges(text: &mut impl Write, ids: impl Iterator<Item = BlockId>) -> fmt::Result {
    let mut ids = ids.peekable();
    if ids.peek().is_none() {
        return text.write_str("-");
    }
    let mut space = "";
    while let Some(start) = ids.next() {
        let mut end = start;
        while ids.peek() == Some(&(end + 1)) {
            end += 1;
            ids.next();
        }
        write!(text, "{space}{start}")?;
        if start != end {
            write!(text, "-{end}")?;
        }
        space = " ";
    }
    Ok(())
}

pub(super) fn write_first_tokens(text: &mut impl Write, block: &[Token]) -> fmt::Result {
    let mut space = "";
    for token in block.iter().take(TOKENS_SHOWN) {
        write!(text, "{space}{token}")?;
        space = " ";
    }
    text.write_str(if block.len() > TOKENS_SHOWN { " .." } else { "" })
}

/// A namespace as Python writes what the caller gave.
pub(super) fn write_namespace(text: &mut impl Write, encoded: &[u8]) -> fmt::Result {
    match namespace::decode(encoded) {
        Namespace::Bytes(name) => write_bytes(text, name),
        Namespace::Pairs(pairs) => {
            let mut start = "(";
            for (kind, value) in pairs.clone() {
                write!(text, "{start}('{}', ", kind.escape_ascii())?;
                write_bytes(text, value)?;
                text.write_str(")")?;
                start = ", ";
            }
            text.write_str(match pairs.count() {
                0 => "()",
                1 => ",)",
                _ => ")",
            })
        }
    }
}

fn write_bytes(text: &mut impl Write, bytes: &[u8]) -> fmt::Result {
    let quote = if bytes.contains(&b'\'') && !bytes.contains(&b'"') { '"' } else { '\'' };
    write!(text, "b{quote}")?;
    for &byte in bytes {
        match byte {
            b'\\' => text.write_str("\\\\")?,
            b'\t' => text.write_str("\\t")?,
            b'\n' => text.write_str("\\n")?,
            b'\r' => text.write_str("\\r")?,
            _ if char::from(byte) == quote => write!(text, "\\{quote}")?,
            0x20..0x7f => text.write_char(char::from(byte))?,
            _ => write!(text, "\\x{byte:02x}")?,
        }
    }
    text.write_char(quote)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut String) -> fmt::Result) -> String {
        let mut text = String::new();
        write(&mut text).unwrap();
        text
    }

    #[test]
    fn ranges_join_ascending_neighbours_only() {
        let ranges = |ids: &[BlockId]| written(|text| write_ranges(text, ids.iter().copied()));
        assert_eq!(ranges(&[4, 5, 6, 9, 2, 1]), "4-6 9 2 1");
        assert_eq!(ranges(&[]), "-");
    }

    #[test]
    fn namespaces_are_written_as_python_writes_them() {
        let repr = |encoded: &[u8]| written(|text| write_namespace(text, encoded));
        assert_eq!(repr(b"\0a'b\x00\n"), "b\"a'b\\x00\\n\"");
        assert_eq!(repr(b"\x01"), "()");
        assert_eq!(repr(b"\x01\x04\0\0\0lora\x01\0\0\0z"), "(('lora', b'z'),)");
        assert_eq!(repr(b"\x01\x01\0\0\0a\0\0\0\0\x01\0\0\0b\0\0\0\0"), "(('a', b''), ('b', b''))");
    }
}
