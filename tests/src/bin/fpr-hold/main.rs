//! Guest workload that notices every lost or altered word of memory.
//!
//! Started by tests inside the guest. `fpr-hold --mib N --for SECONDS` fills N MiB with words that depend on their own place: a quarter each of
//! private anonymous memory, shared memory, a tmpfs file and a ramfs file, plus with `--disk PATH` the page cache of a block device
//! that is filled and read back. It prints `holding`, verifies everything once at the end and whenever a line comes on standard input, and each
//! time prints `mismatches N words M`. `--churn` instead allocates, fills, verifies and frees mappings of random size, at most N MiB at a
//! time, so that huge pages become free and are taken again without end; `--seed` chooses the sizes. Exit status 1 if a word was wrong.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod sys;

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sys::{Mapping, Sharing};

const MIB: usize = 1 << 20;
const WORD: usize = size_of::<u64>();
/// Mounted by the test guest's init.
const TMPFS_FILE: &str = "/dev/shm/fpr-hold";
const RAMFS_FILE: &str = "/ramfs/fpr-hold";

struct Arguments {
    mib: usize,
    duration: Duration,
    seed: u64,
    disk: Option<String>,
    churn: bool,
}

/// What a verification found.
#[derive(Default, Clone, Copy)]
struct Tally {
    words: u64,
    mismatches: u64,
}

impl Tally {
    fn check(&mut self, found: u64, expected: u64) {
        self.words += 1;
        self.mismatches += u64::from(found != expected);
    }

    fn print(self) {
        println!("mismatches {} words {}", self.mismatches, self.words);
    }
}

/// Differs from word to word (the factor is odd, so the product is one-to-one) and from zero almost everywhere.
fn pattern(seed: u64, place: u64) -> u64 {
    (place ^ seed.rotate_left(32)).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn main() -> ExitCode {
    let outcome = arguments()
        .map_err(io::Error::other)
        .and_then(|arguments| if arguments.churn { churn(&arguments) } else { hold(&arguments) });
    match outcome {
        Ok(tally) if tally.mismatches == 0 => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fpr-hold: {error}");
            ExitCode::from(2)
        }
    }
}

fn arguments() -> Result<Arguments, String> {
    let mut parsed = Arguments { mib: 64, duration: Duration::from_secs(10), seed: 1, disk: None, churn: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number =
            || words.next().and_then(|value| value.parse::<u64>().ok()).ok_or(format!("{word} needs a number"));
        match word.as_str() {
            "--mib" => parsed.mib = usize::try_from(number()?).map_err(|error| error.to_string())?,
            "--for" => parsed.duration = Duration::from_secs(number()?),
            "--seed" => parsed.seed = number()?,
            "--disk" => parsed.disk = words.next(),
            "--churn" => parsed.churn = true,
            _ => return Err(format!("unknown argument {word}; known are --mib, --for, --seed, --disk, --churn")),
        }
    }
    Ok(parsed)
}

fn hold(arguments: &Arguments) -> io::Result<Tally> {
    let quarter = (arguments.mib / 4).max(1) * MIB;
    let mut mapped = Vec::new();
    for sharing in [Sharing::Private, Sharing::Shared] {
        mapped.push(filled(quarter, sharing, arguments.seed)?);
    }
    let mut files = Vec::new();
    for path in [TMPFS_FILE, RAMFS_FILE] {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        fill_file(&mut file, quarter, arguments.seed)?;
        files.push((file, quarter));
    }
    if let Some(path) = &arguments.disk {
        let mut disk = OpenOptions::new().read(true).write(true).open(path)?;
        let size = usize::try_from(disk.seek(SeekFrom::End(0))?).map_err(io::Error::other)? / MIB * MIB;
        fill_file(&mut disk, size, arguments.seed)?;
        // What was written is on the disk now; what is read back below is page cache of the kernel's own making.
        disk.sync_all()?;
        files.push((disk, size));
    }
    println!("holding");

    let mut verify = || -> io::Result<Tally> {
        let mut tally = Tally::default();
        mapped.iter().for_each(|mapping| verify_mapping(mapping, arguments.seed, &mut tally));
        for (file, size) in &mut files {
            verify_file(file, *size, arguments.seed, &mut tally)?;
        }
        tally.print();
        Ok(tally)
    };
    let end = Instant::now() + arguments.duration;
    let lines = lines();
    let mut worst = Tally::default();
    while wait(&lines, end) {
        let tally = verify()?;
        worst.mismatches += tally.mismatches;
    }
    let last = verify()?;
    Ok(Tally { mismatches: worst.mismatches + last.mismatches, ..last })
}

/// True when a line has come, false at the end of the time.
fn wait(lines: &mpsc::Receiver<()>, end: Instant) -> bool {
    let left = || end.saturating_duration_since(Instant::now());
    match lines.recv_timeout(left()) {
        Ok(()) => true,
        Err(mpsc::RecvTimeoutError::Timeout) => false,
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            // Standard input has ended: nothing more to listen to.
            std::thread::sleep(left());
            false
        }
    }
}

fn lines() -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        io::stdin().lock().lines().map_while(Result::ok).try_for_each(|_| sender.send(()).map_err(drop))
    });
    receiver
}

fn churn(arguments: &Arguments) -> io::Result<Tally> {
    let end = Instant::now() + arguments.duration;
    let mut random = arguments.seed.max(1);
    let mut next = move || {
        // xorshift64 (Marsaglia 2003).
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let (mut held, mut total, mut tally) = (Vec::<Mapping>::new(), 0, Tally::default());
    println!("churning");
    while Instant::now() < end {
        // From 64 KiB to 32 MiB, small ones as likely as big ones.
        let bytes = (64 << 10) << (next() % 10);
        // Now and then everything goes, so that whole memory blocks become free.
        let keep = if next() % 64 == 0 { 0 } else { (arguments.mib * MIB).saturating_sub(bytes) };
        while total > keep && !held.is_empty() {
            let chosen = usize::try_from(next()).unwrap_or(0) % held.len();
            let mapping = held.swap_remove(chosen);
            verify_mapping(&mapping, arguments.seed, &mut tally);
            total -= mapping.len() * WORD;
        }
        held.push(filled(bytes, Sharing::Private, arguments.seed)?);
        total += bytes;
    }
    held.iter().for_each(|mapping| verify_mapping(mapping, arguments.seed, &mut tally));
    tally.print();
    Ok(tally)
}

fn filled(bytes: usize, sharing: Sharing, seed: u64) -> io::Result<Mapping> {
    let bytes = NonZeroUsize::new(bytes).ok_or_else(|| io::Error::other("an empty mapping"))?;
    let mut mapping = Mapping::new(bytes, sharing)?;
    let start = mapping.as_ptr().addr() as u64;
    for (word, place) in mapping.iter_mut().zip((start..).step_by(WORD)) {
        *word = pattern(seed, place);
    }
    Ok(mapping)
}

fn verify_mapping(mapping: &Mapping, seed: u64, tally: &mut Tally) {
    let start = mapping.as_ptr().addr() as u64;
    mapping.iter().zip((start..).step_by(WORD)).for_each(|(word, place)| tally.check(*word, pattern(seed, place)));
}

fn fill_file(file: &mut File, bytes: usize, seed: u64) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut buffer = vec![0; MIB];
    for chunk in 0..bytes / MIB {
        let start = (chunk * MIB) as u64;
        for (word, place) in buffer.chunks_exact_mut(WORD).zip((start..).step_by(WORD)) {
            word.copy_from_slice(&pattern(seed, place).to_ne_bytes());
        }
        file.write_all(&buffer)?;
    }
    Ok(())
}

fn verify_file(file: &mut File, bytes: usize, seed: u64, tally: &mut Tally) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut buffer = vec![0; MIB];
    for chunk in 0..bytes / MIB {
        let start = (chunk * MIB) as u64;
        file.read_exact(&mut buffer)?;
        for (word, place) in buffer.chunks_exact(WORD).zip((start..).step_by(WORD)) {
            let mut bytes = [0; WORD];
            bytes.copy_from_slice(word);
            tally.check(u64::from_ne_bytes(bytes), pattern(seed, place));
        }
    }
    Ok(())
}
