//! The command line: what the path is like in each direction, and how that changes.

use std::time::Duration;

use clap::Parser;
use testkit::simulation::bottleneck::{Disturbance, Gilbert, Jitter, Loss, Parameters, bytes_at};

/// A path with a bottleneck between two interfaces of this network namespace.
#[derive(Parser)]
pub(crate) struct Options {
    /// The interface to the left side.
    #[arg(long)]
    pub(crate) left: String,
    /// The interface to the right side.
    #[arg(long)]
    pub(crate) right: String,
    /// Rate of the bottleneck in bits of IP packets per second: 200Mbit.
    #[arg(long, value_parser = rate)]
    rate: Option<u64>,
    /// Bytes that may wait, as a number (2000000) or as a time at the rate (40ms).
    #[arg(long, value_parser = Size::parse)]
    queue: Option<Size>,
    /// Propagation delay, one way.
    #[arg(long, value_parser = time)]
    delay: Option<Duration>,
    /// The deviation of each packet's delay: up to 5ms more or less, each as likely, or normal/5ms with that standard deviation.
    #[arg(long, value_parser = jitter)]
    jitter: Option<Jitter>,
    /// Share of packets that arrive twice.
    #[arg(long, value_parser = share)]
    duplicate: Option<u32>,
    /// Share of packets of which a bit changes.
    #[arg(long, value_parser = share)]
    corrupt: Option<u32>,
    /// Share of packets lost at random: 0.01.
    #[arg(long, value_parser = share)]
    loss: Option<u32>,
    /// Loss in bursts: the shares of steps from good to bad and from bad to good, and those lost in the bad (1) and good (0) state:
    /// 0.001,0.1 or 0.001,0.1,0.5,0.001.
    #[arg(long, value_parser = gilbert)]
    gilbert: Option<Gilbert>,
    /// Loses packets behind the queue instead of before it.
    #[arg(long)]
    loss_after_queue: bool,
    /// ECT packets that find more waiting are marked, in bytes or as a time.
    #[arg(long, value_parser = Size::parse)]
    ecn_threshold: Option<Size>,
    /// What differs from left to right: rate=50Mbit,loss=0.
    #[arg(long, value_parser = Change::parse_all)]
    there: Option<Changes>,
    /// What differs from right to left.
    #[arg(long, value_parser = Change::parse_all)]
    back: Option<Changes>,
    /// A change some time after the start: 5s:rate=50Mbit,delay=20ms, or of one direction 5s:there:rate=50Mbit.
    #[arg(long, value_parser = Step::parse)]
    pub(crate) step: Vec<Step>,
    /// What losses come from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// More than one packet in a thousand that is later than this makes a run void.
    #[arg(long, value_parser = time, default_value = "5ms")]
    pub(crate) late: Duration,
}

impl Options {
    /// From left to right, and from right to left.
    pub(crate) fn settings(&self) -> [Settings; 2] {
        let both = Settings {
            rate: self.rate,
            queue: self.queue.unwrap_or(Size::Bytes(usize::MAX)),
            delay: self.delay.unwrap_or_default(),
            jitter: self.jitter.unwrap_or_default(),
            disturbance: Disturbance {
                duplicated_ppm: self.duplicate.unwrap_or_default(),
                corrupted_ppm: self.corrupt.unwrap_or_default(),
            },
            loss_ppm: self.loss.unwrap_or_default(),
            bursts: self.gilbert,
            is_after_queue: self.loss_after_queue,
            ecn: self.ecn_threshold,
        };
        [&self.there, &self.back].map(|changes| {
            let mut settings = both;
            settings.apply(changes.iter().flat_map(|changes| &changes.0));
            settings
        })
    }
}

/// A number of bytes, or what the rate carries in a time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    Bytes(usize),
    Time(Duration),
}

impl Size {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map(Self::Bytes).or_else(|_| time(text).map(Self::Time))
    }

    fn bytes(self, rate: Option<u64>) -> usize {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Time(time) => rate.map_or(usize::MAX, |rate| bytes_at(rate, time)),
        }
    }
}

/// One direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    rate: Option<u64>,
    queue: Size,
    delay: Duration,
    jitter: Jitter,
    disturbance: Disturbance,
    loss_ppm: u32,
    bursts: Option<Gilbert>,
    is_after_queue: bool,
    ecn: Option<Size>,
}

impl Settings {
    pub(crate) fn parameters(&self) -> Parameters {
        let loss = Loss { random_ppm: self.loss_ppm, bursts: self.bursts };
        let (before, after) = match self.is_after_queue {
            true => (Loss::default(), loss),
            false => (loss, Loss::default()),
        };
        Parameters {
            rate_bits: self.rate,
            queue_bytes: self.queue.bytes(self.rate),
            delay: self.delay,
            jitter: self.jitter,
            disturbance: self.disturbance,
            before,
            after,
            ecn_bytes: self.ecn.map(|size| size.bytes(self.rate)),
        }
    }

    pub(crate) fn apply<'a>(&mut self, changes: impl IntoIterator<Item = &'a Change>) {
        for change in changes {
            match *change {
                Change::Rate(rate) => self.rate = Some(rate),
                Change::Queue(size) => self.queue = size,
                Change::Delay(delay) => self.delay = delay,
                Change::Jitter(jitter) => self.jitter = jitter,
                Change::Duplicate(ppm) => self.disturbance.duplicated_ppm = ppm,
                Change::Corrupt(ppm) => self.disturbance.corrupted_ppm = ppm,
                Change::Loss(ppm) => self.loss_ppm = ppm,
                Change::Bursts(bursts) => self.bursts = Some(bursts),
                Change::Ecn(size) => self.ecn = Some(size),
            }
        }
    }
}

/// Another value of one setting.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Rate(u64),
    Queue(Size),
    Delay(Duration),
    Jitter(Jitter),
    Duplicate(u32),
    Corrupt(u32),
    Loss(u32),
    Bursts(Gilbert),
    Ecn(Size),
}

/// Changes of one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes(pub(crate) Vec<Change>);

impl Change {
    fn parse_all(text: &str) -> Result<Changes, String> {
        // A burst's numbers are separated by slashes here, since commas separate the settings.
        text.split(',').map(Self::parse).collect::<Result<_, _>>().map(Changes)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').ok_or("a setting is name=value")?;
        match name {
            "rate" => rate(value).map(Self::Rate),
            "queue" => Size::parse(value).map(Self::Queue),
            "delay" => time(value).map(Self::Delay),
            "jitter" => jitter(value).map(Self::Jitter),
            "duplicate" => share(value).map(Self::Duplicate),
            "corrupt" => share(value).map(Self::Corrupt),
            "loss" => share(value).map(Self::Loss),
            "gilbert" => gilbert(&value.replace('/', ",")).map(Self::Bursts),
            "ecn" => Size::parse(value).map(Self::Ecn),
            other => Err(format!(
                "there is no setting {other}: rate, queue, delay, jitter, loss, gilbert, ecn, duplicate, corrupt"
            )),
        }
    }
}

/// What changes, and when.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) after: Duration,
    /// From left to right, and from right to left.
    pub(crate) changes: [Vec<Change>; 2],
}

impl Step {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (after, what) = text.split_once(':').ok_or("a step is time:changes")?;
        let after = time(after)?;
        let (directions, what) = match what.split_once(':') {
            Some(("there", what)) => ([true, false], what),
            Some(("back", what)) => ([false, true], what),
            Some((other, _)) => return Err(format!("{other} is no direction: there, back")),
            None => ([true, true], what),
        };
        let changes = Change::parse_all(what)?.0;
        Ok(Self { after, changes: directions.map(|is_it| if is_it { changes.clone() } else { Vec::new() }) })
    }
}

/// Number and unit.
fn split(text: &str) -> Result<(f64, &str), String> {
    let end = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let number: f64 = text[..end].parse().map_err(|_| format!("no number: {text}"))?;
    if number.is_finite() && number >= 0.0 { Ok((number, &text[end..])) } else { Err(format!("{text}?")) }
}

fn rate(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let scale = match unit {
        "kbit" => 1e3,
        "Mbit" => 1e6,
        "Gbit" => 1e9,
        _ => return Err(format!("a rate is 64kbit, 200Mbit or 1Gbit, not {text}")),
    };
    match (number * scale).round() as u64 {
        0 => Err("a rate is above 0".to_owned()),
        rate => Ok(rate),
    }
}

fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text)?;
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(format!("a time is 500us, 40ms or 5s, not {text}")),
    };
    Duration::try_from_secs_f64(number * scale).map_err(|error| error.to_string())
}

fn jitter(text: &str) -> Result<Jitter, String> {
    let jitter = match text.split_once('/') {
        None => Jitter::Uniform(time(text)?),
        Some(("normal", deviation)) => Jitter::Normal(time(deviation)?),
        Some((other, _)) => return Err(format!("jitter is 5ms or normal/5ms, not {other}/")),
    };
    match jitter {
        Jitter::Uniform(Duration::ZERO) | Jitter::Normal(Duration::ZERO) => Ok(Jitter::None),
        jitter @ (Jitter::None | Jitter::Uniform(_) | Jitter::Normal(_)) => Ok(jitter),
    }
}

/// In millionths.
fn share(text: &str) -> Result<u32, String> {
    match split(text)? {
        (number, "") if number <= 1.0 => Ok((number * 1e6).round() as u32),
        _ => Err(format!("a share is 0 to 1, not {text}")),
    }
}

fn gilbert(text: &str) -> Result<Gilbert, String> {
    let shares: Vec<u32> = text.split(',').map(share).collect::<Result<_, _>>()?;
    let (to_bad_ppm, to_good_ppm, rest) = match shares[..] {
        [to_bad, to_good, ref rest @ ..] if rest.len() <= 2 => (to_bad, to_good, rest),
        _ => return Err("two to four shares".to_owned()),
    };
    let bad_loss_ppm = rest.first().copied().unwrap_or(1_000_000);
    Ok(Gilbert { to_bad_ppm, to_good_ppm, good_loss_ppm: rest.get(1).copied().unwrap_or(0), bad_loss_ppm })
}
