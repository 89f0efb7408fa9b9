// What the tests of both crates do with a committed corpus; `quic-core/src/fuzz.rs` and `agent/crates/testkit/src/fuzz/tests.rs` include it.

use std::{env, fs, path::Path};

/// The longest mutant, in bytes: as in `fuzz/run`.
const MOST_BYTES: usize = 8192;

/// Bytes at which lengths, signs and varints change.
const EDGES: [u8; 12] = [0, 1, 2, 0x1f, 0x3f, 0x40, 0x7f, 0x80, 0xbf, 0xc0, 0xfe, 0xff];

/// Runs `target` on each file of its corpus, then on `mutants` mutated copies of each. What fails says which file, which mutant of it and
/// with which seed; `CULVERT_TEST_SEED` sets another one.
fn replay(name: &str, mutants: u32, target: fn(&[u8])) {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join("fuzz/corpus"));
    let corpus = folders.find(|folder| folder.is_dir()).unwrap().join(name);
    let mut files: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "a corpus of {} files", files.len());
    let inputs: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let seed = env::var("CULVERT_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut draw = Draw(seed);
    let mut run = Run { file: Path::new(""), mutant: 0, seed, input: Vec::new() };
    for (file, input) in files.iter().zip(&inputs) {
        (run.file, run.mutant) = (file, 0);
        run.input.clone_from(input);
        target(&run.input);
        for mutant in 1..=mutants {
            run.mutant = mutant;
            run.input.clone_from(input);
            mutate(&mut run.input, &inputs, &mut draw);
            target(&run.input);
        }
    }
}

/// Says what ran when a target panics.
struct Run<'a> {
    file: &'a Path,
    /// 0 for the file itself.
    mutant: u32,
    seed: u64,
    input: Vec<u8>,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { file, mutant, seed, input } = self;
            let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            println!("{}, mutant {mutant} with CULVERT_TEST_SEED={seed}: {hex}", file.display());
        }
    }
}

/// Changes `input` in one to four places.
fn mutate(input: &mut Vec<u8>, others: &[Vec<u8>], draw: &mut Draw) {
    for _ in 0..=draw.below(4) {
        let at = draw.below(input.len());
        let end = at + draw.below((input.len() - at).min(32) + 1);
        match draw.below(9) {
            0 if at < input.len() => input[at] ^= 1 << draw.below(8),
            1 if at < input.len() => input[at] = draw.byte(),
            2 if at < input.len() => input[at] = EDGES[draw.below(EDGES.len())],
            3 => input.truncate(at),
            4 => drop(input.drain(at..end)),
            5 => {
                let piece = input[at..end].to_vec();
                let to = draw.below(input.len() + 1);
                drop(input.splice(to..to, piece));
            }
            6 => {
                let other = &others[draw.below(others.len())];
                let from = draw.below(other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            // A number of four bytes that is one more or less than an edge of its range.
            7 if at + 4 <= input.len() => {
                let edge = [0_u32, 1 << 14, 1 << 16, 1 << 30, 1 << 31][draw.below(5)];
                let number = edge.wrapping_add(u32::from(draw.byte() % 3)).wrapping_sub(1);
                input[at..at + 4].copy_from_slice(&number.to_be_bytes());
            }
            _ => {
                let bytes: Vec<_> = (0..=draw.below(8)).map(|_| draw.byte()).collect();
                drop(input.splice(at..at, bytes));
            }
        }
        input.truncate(MOST_BYTES);
    }
}

/// Draws of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Below `bound`, and 0 below 0.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).expect("below a usize")
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}
