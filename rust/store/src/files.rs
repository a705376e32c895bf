//! The directory: whose files are ours, how they are opened, and who may write.
//!
//! Only regular files with our names are opened or deleted; what else lies there stays as it is. A file is opened for
//! writing either as a new one (which follows no link) or after a look that the name is the file itself.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format::{Geometry, VERSION};

const MANIFEST: &str = "kvpager.manifest";
const NEW_MANIFEST: &str = "kvpager.manifest.new";
const LOCK: &str = "kvpager.lock";
/// What disks give space in.
const PAGE: u64 = 4096;
/// Most bytes of an identity.
pub const IDENTITY_BYTES_MAX: usize = 65_536;
const MANIFEST_BYTES_MAX: u64 = 2 * IDENTITY_BYTES_MAX as u64 + 1024;

/// Bytes that a file of so many takes of the limit: whole pages, so that what the disk gives is counted, too.
pub fn charged(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE)
}

/// What a name in the directory stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// The manifest, one that is being written, or the lock.
    Fixed,
    /// A segment.
    Segment(u64),
    /// The keys of a segment.
    Keys(u64),
}

impl Name {
    /// What a name of ours stands for.
    pub fn parse(name: &str) -> Option<Self> {
        if matches!(name, MANIFEST | NEW_MANIFEST | LOCK) {
            return Some(Self::Fixed);
        }
        let (number, kind) = name.strip_prefix("kvpager-")?.split_once('.')?;
        let parsed = u64::from_str_radix(number, 16).ok()?;
        let name = match kind {
            "seg" => Self::Segment(parsed),
            "keys" => Self::Keys(parsed),
            _ => return None,
        };
        // One spelling only.
        (format!("{parsed:016x}") == number).then_some(name)
    }
}

/// The path of a segment.
pub fn segment_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("kvpager-{number:016x}.seg"))
}

/// The path of a segment's keys.
pub fn keys_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("kvpager-{number:016x}.keys"))
}

/// What lies in a directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// Numbers of segments, ascending.
    pub segments: Vec<u64>,
    /// Numbers of segments of which there are keys, ascending.
    pub keys: Vec<u64>,
    /// Names of everything else, sorted.
    pub foreign: Vec<String>,
    /// The greatest number that a name of ours has, whatever lies there.
    pub greatest: Option<u64>,
    /// Is there a manifest?
    pub has_manifest: bool,
}

/// Looks what lies in a directory.
///
/// # Errors
/// If it cannot be read.
pub fn list(directory: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let parsed = name.to_str().and_then(Name::parse);
        if let Some(Name::Segment(number) | Name::Keys(number)) = parsed {
            listing.greatest = listing.greatest.max(Some(number));
        }
        // It may be gone by now.
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        match parsed {
            Some(Name::Segment(number)) if is_file => listing.segments.push(number),
            Some(Name::Keys(number)) if is_file => listing.keys.push(number),
            Some(Name::Fixed) if is_file => listing.has_manifest |= name == MANIFEST,
            _ => listing.foreign.push(name.to_string_lossy().into_owned()),
        }
    }
    listing.segments.sort_unstable();
    listing.keys.sort_unstable();
    listing.foreign.sort_unstable();
    Ok(listing)
}

/// Bytes of all files with our names.
///
/// # Errors
/// If the directory cannot be read.
pub fn bytes(directory: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_str().and_then(Name::parse).is_some() {
            // One that is gone by now has none.
            bytes += entry.metadata().ok().filter(fs::Metadata::is_file).map_or(0, |metadata| metadata.len());
        }
    }
    Ok(bytes)
}

/// Opens a regular file that is there; a link is refused.
///
/// # Errors
/// If the system refuses, or the name is no regular file of its own.
pub fn open_existing(path: &Path, writes: bool) -> io::Result<File> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file");
    // First a look: to open a pipe would wait for somebody at its other end.
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(refused());
    }
    let file = OpenOptions::new().read(true).write(writes).open(path)?;
    let (named, opened) = (fs::symlink_metadata(path)?, file.metadata()?);
    if named.is_file() && (named.dev(), named.ino()) == (opened.dev(), opened.ino()) {
        Ok(file)
    } else {
        Err(refused())
    }
}

/// Makes a file that was not there.
///
/// # Errors
/// If the system refuses, or the name is taken.
pub fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path)
}

/// Deletes a file; that it is not there is as good.
///
/// # Errors
/// If the system refuses.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes names that were added or removed last.
///
/// # Errors
/// If the system refuses.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// The right to write to a directory, for as long as this process has it: the system takes it back when the process
/// ends, however it does.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// Takes the right.
    ///
    /// # Errors
    /// `Io` if another has it, in this process or another, or the directory cannot be written to.
    pub fn take(directory: &Path) -> Result<Self> {
        let path = directory.join(LOCK);
        let file = match create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open_existing(&path, true),
            other => other,
        };
        let file = file.map_err(|error| Error::io("open for writing", &path, &error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Io(format!(
                    "the store at {} is in use: {} has it open for writing; close that one, or take another directory",
                    directory.display(),
                    holder(&file)
                )));
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path, &error)),
        }
        // For the message above. That it cannot be written will be told by what matters.
        let _ = file.set_len(0).and_then(|()| file.write_all_at(std::process::id().to_string().as_bytes(), 0));
        Ok(Self(file))
    }

    /// Gives the right back, also where a child of fork still has the file.
    pub fn release(self) {
        // Closing the file, which comes next, would do otherwise.
        let _ = self.0.unlock();
    }
}

fn holder(file: &File) -> String {
    let mut text = String::new();
    let is_read = file.take(20).read_to_string(&mut text).is_ok();
    if is_read && text.parse::<u32>().is_ok() { format!("process {text}") } else { "another process".to_owned() }
}

/// What a directory says of its store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Sizes of its records.
    pub geometry: Geometry,
    /// Whose blocks these are.
    pub identity: Vec<u8>,
}

impl Manifest {
    /// A manifest for a new store.
    #[must_use]
    pub fn new(meta_bytes: usize, row_bytes: usize, identity: &[u8]) -> Self {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self { geometry: Geometry { store: hasher.finish(), meta_bytes, row_bytes }, identity: identity.to_vec() }
    }

    /// Bytes of the limit that the fixed files take: this one, its copy while it is written, and the lock.
    #[must_use]
    pub fn charged(&self) -> u64 {
        2 * charged(self.text().len() as u64) + PAGE
    }

    fn text(&self) -> String {
        let Geometry { store, meta_bytes, row_bytes } = self.geometry;
        let mut text = format!(
            "kvpager store\nversion {VERSION}\nmeta_bytes {meta_bytes}\nrow_bytes {row_bytes}\nstore {store:016x}\nidentity "
        );
        for byte in &self.identity {
            let _ = write!(text, "{byte:02x}");
        }
        let crc = crc32fast::hash(text.as_bytes());
        let _ = writeln!(text, "\ncrc {crc:08x}");
        text
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// `Io`.
    pub fn write(&self, directory: &Path, syncs: bool) -> Result<()> {
        let (new, path) = (directory.join(NEW_MANIFEST), directory.join(MANIFEST));
        let written = remove(&new).and_then(|()| {
            let mut file = create(&new)?;
            file.write_all(self.text().as_bytes())?;
            if syncs {
                file.sync_all()?;
            }
            fs::rename(&new, &path)?;
            if syncs { sync_directory(directory) } else { Ok(()) }
        });
        written.map_err(|error| {
            let _ = remove(&new);
            Error::io("write", &path, &error)
        })
    }

    /// Reads what is there.
    ///
    /// # Errors
    /// `Io` if the system refuses; `Config` if it is no manifest, or of another version.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST);
        let mut text = Vec::new();
        open_existing(&path, false)
            .and_then(|file| file.take(MANIFEST_BYTES_MAX).read_to_end(&mut text))
            .map_err(|error| Error::io("read", &path, &error))?;
        let text = String::from_utf8_lossy(&text);
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        if let Some(version) = field("version").filter(|_| text.starts_with("kvpager store\n"))
            && version != VERSION.to_string()
        {
            return Err(Error::Config(format!(
                "the store at {} has format version {}, this kvpager writes {VERSION}: take another directory, or delete it",
                directory.display(),
                version.chars().take(20).collect::<String>()
            )));
        }
        let read = || {
            let geometry = Geometry {
                store: u64::from_str_radix(field("store")?, 16).ok()?,
                meta_bytes: field("meta_bytes")?.parse().ok()?,
                row_bytes: field("row_bytes")?.parse().ok()?,
            };
            let (pairs, []) = field("identity")?.as_bytes().as_chunks::<2>() else { return None };
            let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
            let manifest = Self { geometry, identity: pairs.iter().map(byte).collect::<Option<_>>()? };
            (manifest.text() == text).then_some(manifest)
        };
        read().ok_or_else(|| {
            Error::Config(format!(
                "{} is damaged or no manifest of kvpager's: delete the directory to start again",
                path.display()
            ))
        })
    }

    /// Does it say what the caller expects? The store's number is its own.
    ///
    /// # Errors
    /// `Config`, naming both.
    pub fn check(&self, expected: &Self, directory: &Path) -> Result<()> {
        let differs = |what: &str, there: String, here: String| {
            Err(Error::Config(format!(
                "the store at {} has {what} {there}, not {here}: take another directory, or delete it",
                directory.display()
            )))
        };
        let (there, here) = (self.geometry, expected.geometry);
        if there.row_bytes != here.row_bytes {
            return differs("row_bytes", there.row_bytes.to_string(), here.row_bytes.to_string());
        }
        if there.meta_bytes != here.meta_bytes {
            return differs("meta_bytes", there.meta_bytes.to_string(), here.meta_bytes.to_string());
        }
        if self.identity != expected.identity {
            return differs("identity", shown(&self.identity), shown(&expected.identity));
        }
        Ok(())
    }
}

/// Bytes as a message shows them: not all of many.
pub fn shown(bytes: &[u8]) -> String {
    let start = bytes[..bytes.len().min(60)].escape_ascii();
    if bytes.len() > 60 { format!("b\"{start}\"... ({} bytes)", bytes.len()) } else { format!("b\"{start}\"") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ours_in_one_spelling() {
        assert_eq!(Name::parse("kvpager-000000000000001f.seg"), Some(Name::Segment(31)));
        assert_eq!(Name::parse("kvpager-ffffffffffffffff.keys"), Some(Name::Keys(u64::MAX)));
        assert_eq!(Name::parse("kvpager.lock"), Some(Name::Fixed));
        for foreign in
            ["kvpager-1.seg", "kvpager-000000000000001F.seg", "kvpager-+00000000000001f.seg", "x.seg", "kvpager-.seg"]
        {
            assert_eq!(Name::parse(foreign), None, "{foreign}");
        }
    }
}
