//! The drawing of the naive pager (`docs/design/rules.md` 12). One text compares everything that decides later answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use kvpager_core::PolicyKind;
use kvpager_core::ids::BlockId;

use super::naive::{Naive, Sequence};

type Traits = (usize, u64, bool, Option<u64>);

pub fn draw(naive: &Naive) -> String {
    let stats = naive.stats();
    let mut text = format!(
        "pool: {} blocks of {} tokens: {} free, {} cached, {} active, {} reserved\n",
        stats.total_blocks,
        naive.config.block_size,
        stats.free_blocks,
        stats.cached_blocks,
        stats.active_blocks,
        stats.reserved_blocks
    );
    let holders = holders(naive);
    for (name, children) in &naive.roots {
        let _ = writeln!(text, "namespace {}", repr(name));
        siblings(naive, &holders, children, &[], &mut text);
    }
    let _ = writeln!(text, "free: {}", ranges(naive.free.iter().rev().copied()));
    let names: &[&str] = if naive.config.policy == PolicyKind::Lru { &["lru"] } else { &["probation", "protected"] };
    for (name, queue) in names.iter().zip(&naive.queues) {
        let _ = writeln!(text, "queue {name}: {}", ranges(queue.iter().copied()));
    }
    for (serial, sequence) in &naive.sequences {
        draw_sequence(*serial, sequence, &mut text);
    }
    let copies: Vec<String> = naive.copies.iter().map(|(source, target)| format!("{source}->{target}")).collect();
    let _ = writeln!(text, "copies: {}", if copies.is_empty() { "-".to_owned() } else { copies.join(" ") });
    let _ = writeln!(text, "clock: {}", naive.counters.clock_ticks);
    let _ = writeln!(text, "next sequence: {}", naive.next_serial);
    let counters: Vec<String> = naive.counters.named().iter().map(|(name, value)| format!("{name}={value}")).collect();
    let _ = writeln!(text, "stats: {}", counters.join(" "));
    text
}

/// Every sequence and every queued copy counts once for each block that it holds, those above included (2.1, 2.2).
fn holders(naive: &Naive) -> BTreeMap<BlockId, usize> {
    let mut counts = BTreeMap::new();
    let mut count = |blocks: &mut dyn Iterator<Item = BlockId>| {
        let mut held = BTreeSet::new();
        for mut block in blocks {
            held.insert(block);
            while let Some(above) = naive.nodes[block as usize].as_ref().and_then(|node| node.above) {
                held.insert(above);
                block = above;
            }
        }
        for block in held {
            *counts.entry(block).or_insert(0) += 1;
        }
    };
    for sequence in naive.sequences.values() {
        count(&mut sequence.table.iter().chain(&sequence.path).copied());
    }
    for &(source, _) in &naive.copies {
        count(&mut std::iter::once(source));
    }
    counts
}

/// `indent` has one piece a level; below 32 levels a line starts with its level instead.
fn siblings(
    naive: &Naive,
    holders: &BTreeMap<BlockId, usize>,
    children: &[BlockId],
    indent: &[&str],
    text: &mut String,
) {
    let traits = |block: BlockId| -> Traits {
        let node = naive.nodes[block as usize].as_ref().unwrap();
        let held = holders.get(&block).copied().unwrap_or(0);
        (held, node.hits, node.is_marked, (held == 0).then_some(node.idle_since))
    };
    for (nth, &child) in children.iter().enumerate() {
        let mut segment = vec![child];
        let mut end = naive.nodes[child as usize].as_ref().unwrap();
        while let [only] = end.children[..]
            && traits(only) == traits(child)
        {
            segment.push(only);
            end = naive.nodes[only as usize].as_ref().unwrap();
        }
        let is_last = nth + 1 == children.len();
        let (held, hits, is_marked, idle_since) = traits(child);
        let tokens = &naive.nodes[child as usize].as_ref().unwrap().tokens;
        let start = if indent.len() < 32 { indent.concat() } else { format!("{}: ", indent.len()) };
        let shown: Vec<String> = tokens.iter().take(4).map(ToString::to_string).collect();
        let _ = write!(
            text,
            "{start}{} {} {} {}: tokens {}{}; holders {held}; hits {hits}",
            if is_last { "└─" } else { "├─" },
            segment.len(),
            if segment.len() == 1 { "block" } else { "blocks" },
            ranges(segment.iter().copied()),
            shown.join(" "),
            if tokens.len() > 4 { " .." } else { "" }
        );
        text.push_str(if is_marked { "; marked" } else { "" });
        if let Some(since) = idle_since {
            let _ = write!(text, "; idle since {since}");
        }
        text.push('\n');
        let below = [indent, &[if is_last { "   " } else { "│  " }]].concat();
        siblings(naive, holders, &end.children, &below, text);
    }
}

fn draw_sequence(serial: u64, sequence: &Sequence, text: &mut String) {
    let _ = write!(
        text,
        "sequence {serial}: {}; namespace {}; cached {}; committed {}; planned {}; len {}",
        if sequence.is_running { "running" } else { "preempted" },
        repr(&sequence.namespace),
        sequence.num_cached,
        sequence.num_committed,
        sequence.num_committed,
        sequence.tokens.len()
    );
    if sequence.num_preemptions > 0 {
        let _ = write!(text, "; preempted {}", sequence.num_preemptions);
    }
    if let Some((next, nth)) = sequence.back {
        let _ = write!(text, "; back {next}.{nth}");
    }
    if sequence.is_running {
        let yes_no = |yes| if yes { "yes" } else { "no" };
        let _ = write!(
            text,
            "; path {}; table {}; publishes {}; pinned {}",
            ranges(sequence.path.iter().copied()),
            ranges(sequence.table.iter().copied()),
            yes_no(sequence.publishes),
            yes_no(sequence.is_pinned)
        );
    }
    text.push('\n');
}

/// The namespaces of the tests are letters.
fn repr(encoded: &[u8]) -> String {
    format!("b'{}'", String::from_utf8_lossy(&encoded[1..]))
}

fn ranges(blocks: impl Iterator<Item = BlockId>) -> String {
    let mut ranges: Vec<(BlockId, BlockId)> = Vec::new();
    for block in blocks {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == block => *last = block,
            _ => ranges.push((block, block)),
        }
    }
    let text = |&(first, last): &(BlockId, BlockId)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    if ranges.is_empty() { "-".to_owned() } else { ranges.iter().map(text).collect::<Vec<_>>().join(" ") }
}
