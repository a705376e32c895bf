//! Beams: rows that go on from other rows.

use super::Pager;
use super::rows::{append_reserved, follow_row};
use crate::batch::{Batch, PENDING_MAX, Seat};
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::{BlockId, Handle};
use crate::memory::{with_capacity, zeroed};
use crate::sequence::Sequence;

/// What became of the rows that took part.
#[derive(Debug)]
pub struct Beams {
    /// The row of each beam.
    pub places: Vec<u32>,
    /// The new sequence of each beam, unless it keeps its parent's.
    pub children: Vec<Option<Handle>>,
    /// Sequences that no beam goes on from.
    pub released: Vec<Handle>,
}

/// What a row is in a reorder.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Role {
    /// It does not take part.
    #[default]
    Apart,
    /// No beam goes on from it.
    Leaves,
    /// Its first beam keeps it.
    Stays,
}

impl Pager {
    /// Beam i continues the sequence of row `parents[i]` with `tokens[i]`. Of `rows` (all in use, if not given), those
    /// without a beam are released.
    ///
    /// # Errors
    /// `Step` if a step is open; `Value` for bad rows or parents, and if there are too few rows; `Token`; `Memory`.
    pub fn reorder(&mut self, handle: Handle, parents: &[i32], tokens: &[i32], rows: Option<&[i32]>) -> Result<Beams> {
        let roles = self.check_beams(handle, parents, tokens, rows)?;
        // Whatever can be refused comes first: the children, which hold nothing yet, and room for the tokens.
        let places = self.place_beams(handle, &roles, parents)?;
        let unborn = self.make_children(handle, parents, &places)?;
        let is_leaver = |&row: &usize| roles[row] == Role::Leaves;
        let mut released = with_capacity((0..roles.len()).filter(is_leaver).count())?;
        for row in (0..roles.len()).filter(is_leaver) {
            released.push(self.sequence_of(handle, row as u32)?);
        }
        let mut children = with_capacity(parents.len())?;
        self.left_beams.clear();
        self.left_beams.try_reserve(released.len())?;
        self.sequences.reserve(parents.len())?;

        self.with_batch(handle, |pager, batch| {
            // The children take the leavers' places in the order of rows, which is that of the leavers' releases. That a
            // child comes when others have left already makes no difference: what it holds, its parent holds all along.
            let mut next_unused = 0;
            for ((&parent, &place), child) in parents.iter().zip(&places).zip(unborn) {
                let parent = parent.cast_unsigned();
                if place == parent {
                    children.push(None);
                    continue;
                }
                let child = match child {
                    Some(child) => pager.bear(batch, parent, place, child)?,
                    None => pager.take_over(batch, parent, place),
                };
                pager.set_seat(child, Seat::Row { batch: handle, row: place });
                children.push(Some(child));
                next_unused = place as usize + 1;
            }
            for row in (next_unused..roles.len()).filter(is_leaver) {
                pager.end_row(batch, row);
                batch.unseat(row as u32);
            }
            for (&row, &token) in places.iter().zip(tokens) {
                let at = row as usize;
                if !batch.rows[at].push(&mut batch.pending[at], &[token])
                    && let Some(sequence) = batch.sequences[at].and_then(|handle| pager.sequences.get_mut(handle))
                {
                    append_reserved(sequence, &[token.cast_unsigned()], pager.config.block_size);
                }
            }
            Ok(())
        })?;
        Ok(Beams { places, children, released })
    }

    /// The row of each beam: its parent's for the first one, the lowest empty one for all others.
    fn place_beams(&self, handle: Handle, roles: &[Role], parents: &[i32]) -> Result<Vec<u32>> {
        let batch = self.get_batch(handle)?;
        let mut empty = (0..).filter(|&row| {
            roles.get(row) == Some(&Role::Leaves) || batch.sequences.get(row).is_none_or(Option::is_none)
        });
        let (mut places, mut is_kept): (_, Vec<bool>) = (with_capacity(parents.len())?, zeroed(roles.len())?);
        for &parent in parents {
            let row = parent.cast_unsigned();
            let is_first = !std::mem::replace(&mut is_kept[row as usize], true);
            places.push(if is_first { row } else { empty.next().unwrap_or_default() as u32 });
        }
        Ok(places)
    }

    /// A child for each beam that does not keep its parent's row, unless a sequence that leaves can become that; and room
    /// for the tokens of the others.
    fn make_children(&mut self, handle: Handle, parents: &[i32], places: &[u32]) -> Result<Vec<Option<Box<Sequence>>>> {
        let beams = || parents.iter().map(|parent| parent.cast_unsigned()).zip(places.iter().copied());
        for (parent, place) in beams().filter(|(parent, place)| parent != place) {
            if !self.can_take_over(handle, parent, place)? {
                // Its row is cold then, which tells that all its children are made.
                self.flush_row(self.sequence_of(handle, parent)?);
            }
        }
        let mut children = with_capacity(places.len())?;
        for (parent, place) in beams() {
            children.push(if parent == place {
                self.make_room_for_token(handle, parent)?
            } else if self.get_batch(handle)?.rows[parent as usize].is_cold() {
                Some(self.beam_of(handle, parent)?)
            } else {
                None
            });
        }
        Ok(children)
    }

    /// Can the sequence that leaves a row become a child of another row's? It can if that row has all tokens that are not in
    /// the tree, and its table ends with them. Asks for the memory.
    fn can_take_over(&mut self, handle: Handle, parent: u32, place: u32) -> Result<bool> {
        let batch = self.get_batch(handle)?;
        let (row, block_size) = (&batch.rows[parent as usize], batch.block_size);
        let leaver = batch.sequences.get(place as usize).copied().flatten();
        if !batch.has_room_for_token(parent as usize) || row.table_end != row.len.next_multiple_of(block_size) {
            return Ok(false);
        }
        let Some(parent) = self.sequences.get(self.sequence_of(handle, parent)?) else { return Ok(false) };
        let (has_tail, blocks) = (!parent.tail.is_empty(), parent.table.len());
        let Some(leaver) = leaver.and_then(|leaver| self.sequences.get_mut(leaver)) else { return Ok(false) };
        if has_tail || leaver.tail.room_when_cleared(block_size as usize) < PENDING_MAX {
            return Ok(false);
        }
        leaver.table.try_reserve_exact(blocks.saturating_sub(leaver.table.len()))?;
        Ok(true)
    }

    /// The sequence that leaves a row becomes a child of another row's, and the row its copy. Usually they are siblings:
    /// what both hold is not touched.
    fn take_over(&mut self, batch: &mut Batch, parent: u32, place: u32) -> Handle {
        let (from, to, block_size) = (parent as usize, place as usize, self.config.block_size);
        let take = |pager: &mut Self, at: usize| {
            let handle = batch.sequences[at]?;
            Some((handle, pager.sequences.take(handle)?))
        };
        let (Some((parent, mut kept)), Some((handle, mut sequence))) = (take(self, from), take(self, to)) else {
            unreachable!("rows {from} and {to} hold running sequences");
        };
        follow_row(&batch.rows[from], &mut kept, block_size);
        follow_row(&batch.rows[to], &mut sequence, block_size);
        self.withdraw(&mut sequence);
        let context = Self::context(&sequence, Departure::Finished);
        self.each_table_only(&kept, 0..usize::MAX, |pager, block| pager.hold_block(block, 1));
        self.each_table_only(&sequence, 0..usize::MAX, |pager, block| pager.let_go_of_block(block, context));
        if sequence.end != kept.end {
            self.hold(kept.end, 1);
            self.let_go(sequence.end, context);
        }
        if sequence.root != kept.root {
            self.index.root_mut(kept.root).pins += 1;
            self.unpin_root(sequence.root);
        }
        self.num_running_pinned -= usize::from(sequence.pinned);
        self.counters.clock_ticks += 1;

        let common = num_common(&sequence.table, &kept.table);
        Self::turn_into_child(&mut sequence, &kept, common);
        let child = self.sequences.renew(handle);
        sequence.serial = child.serial;
        self.sequences.put_back(child, sequence);
        self.sequences.put_back(parent, kept);
        batch.share(from, place, child, common);
        child
    }

    /// A child that was made takes a row, and who leaves that is released.
    fn bear(&mut self, batch: &mut Batch, parent: u32, place: u32, child: Box<Sequence>) -> Result<Handle> {
        let Some(parent) = batch.sequences[parent as usize] else { unreachable!("row {parent} is in use") };
        let leaver = batch.sequences.get(place as usize).copied().flatten();
        let leaver = leaver.and_then(|leaver| self.sequences.get(leaver));
        let column = leaver.map(|leaver| num_common(&leaver.table, &child.table));
        let child = self.with_running(parent, "reorder", |pager, parent| {
            pager.hold_like(parent, 1);
            Ok(pager.start_child(child))
        })?;
        if let Some(column) = column {
            self.end_row(batch, place as usize);
            batch.replace(place, child, column);
        } else {
            batch.seat(child);
        }
        Ok(child)
    }

    /// Releases the sequence of a row, which goes to another one or is emptied, and keeps its memory.
    fn end_row(&mut self, batch: &Batch, at: usize) {
        let Some(handle) = batch.sequences[at] else { return };
        let Some(sequence) = self.sequences.get_mut(handle) else { return };
        sequence.seat = Seat::None;
        follow_row(&batch.rows[at], sequence, self.config.block_size);
        let ended = self.end(handle, Departure::Finished);
        self.left_beams.extend(ended);
    }

    /// Room for the token of a beam that keeps its row: there, or in its sequence. (It needs no child.)
    fn make_room_for_token(&mut self, handle: Handle, row: u32) -> Result<Option<Box<Sequence>>> {
        let sequence = self.sequence_of(handle, row)?;
        if !self.get_batch(handle)?.has_room_for_token(row as usize) {
            self.with_running(sequence, "reorder", |pager, sequence| {
                sequence.tail.reserve(1, pager.config.block_size)
            })?;
        }
        Ok(None)
    }

    /// A child for a beam whose parent another one keeps, with room for a token. It takes over the memory of one that was
    /// left by an earlier call, if there is one: beams come and go at each token.
    fn beam_of(&mut self, handle: Handle, row: u32) -> Result<Box<Sequence>> {
        let parent = self.sequence_of(handle, row)?;
        let left = self.left_beams.pop();
        self.with_running(parent, "reorder", |pager, parent| {
            parent.tail.reserve(1, pager.config.block_size)?;
            let mut child = match left {
                Some(left) => pager.child_in(parent, left)?,
                None => pager.child_of(parent)?,
            };
            child.tail.reserve(1, pager.config.block_size)?;
            Ok(child)
        })
    }

    /// The role of each row.
    fn check_beams(&self, handle: Handle, parents: &[i32], tokens: &[i32], rows: Option<&[i32]>) -> Result<Vec<Role>> {
        let batch = self.get_batch(handle)?;
        if batch.num_open() > 0 {
            return Err(Error::Step(format!("reorder: step {} is open; commit it first", batch.oldest)));
        }
        if tokens.len() != parents.len() {
            return Err(Error::Value(format!("there are {} parents and {} tokens", parents.len(), tokens.len())));
        }
        if let Some(position) = tokens.iter().position(|&token| token < 0) {
            return Err(Error::Token { position, value: tokens[position].cast_unsigned() });
        }
        let is_named = rows.map(|rows| batch.named_rows(rows)).transpose()?;
        let mut roles: Vec<Role> = zeroed(batch.rows.len())?;
        let mut num_taking = 0;
        for (at, role) in roles.iter_mut().enumerate() {
            if is_named.as_ref().map_or_else(|| batch.sequences[at].is_some(), |is_named| is_named[at]) {
                (*role, num_taking) = (Role::Leaves, num_taking + 1);
            }
        }
        let mut num_kept = 0;
        let mut sequences = with_capacity(parents.len())?;
        for (nth, &parent) in parents.iter().enumerate() {
            let Some(at) = batch.in_use(parent).filter(|&at| roles[at] != Role::Apart) else {
                return Err(Error::Value(format!("parents[{nth}] is {parent}: no row in use that takes part")));
            };
            if std::mem::replace(&mut roles[at], Role::Stays) == Role::Leaves {
                num_kept += 1;
                sequences.extend(batch.sequences[at].map(|sequence| (nth, sequence)));
            }
        }
        let empty = batch.shape.max_seqs - batch.num_sequences + num_taking - num_kept;
        for (nth, sequence) in sequences {
            let sequence = self.running(sequence, "reorder")?;
            let row = &batch.rows[parents[nth].cast_unsigned() as usize];
            let (len, committed) = if row.is_cold() {
                (sequence.len, sequence.num_committed)
            } else {
                (row.len as usize, row.committed as usize)
            };
            if len > committed {
                return Err(Error::Value(format!(
                    "parents[{nth}] is {}: of its {len} tokens {committed} are committed. Commit the step without next tokens first",
                    parents[nth]
                )));
            }
        }
        if parents.len() - num_kept > empty {
            return Err(Error::Value(format!(
                "{} beams need another row; {empty} are empty: max_seqs",
                parents.len() - num_kept
            )));
        }
        Ok(roles)
    }
}

/// Blocks in which two tables agree before they begin to differ.
fn num_common(a: &[BlockId], b: &[BlockId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
