//! Fair pairs: two servers that are compared within one run.
//!
//! The machine drifts and the two are never quite alike: whoever starts first gets other memory, and a load falls into
//! another rhythm with the scheduler each time that it starts (a fifth between two of them was seen). So each is first in
//! turn, and the load comes in many short slices, A B B A A B B A ..., each with a rhythm of its own.
use crate::measure;
use crate::record::Mode;
use anyhow::Result;

/// What a vanilla server is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Second {
    /// The patched build with the module
    Loaded,
    /// The patched build without the module: what the patches and another layout of the code cost
    Unloaded,
    /// Another one of the vanilla build: how far two equal servers lie apart
    Vanilla,
}

impl Second {
    /// Of the two builds the second server's, and the mode of the module there; `None` = no module.
    pub fn server<T>(self, vanilla: T, patched: T, mode: Mode) -> (T, Option<Mode>) {
        match self {
            Second::Loaded => (patched, Some(mode)),
            Second::Unloaded => (patched, None),
            Second::Vanilla => (vanilla, None),
        }
    }

    /// For the settings of a record.
    pub fn told(self, mode: Mode) -> String {
        match self {
            Second::Loaded => format!("Atropos's mode = {}", mode.name()),
            Second::Unloaded => "the second server (\"patched\") is without the module".into(),
            Second::Vanilla => "the second server (\"patched\") is vanilla, too".into(),
        }
    }

    /// What follows the name of a record.
    pub fn suffix(self) -> &'static str {
        ["", "-unloaded", "-noise"][self as usize]
    }
}

/// Of `pair` (from 1 on) starts both, number 0 first in every second one.
pub fn start_both<T>(pair: u32, start: impl Fn(usize) -> Result<T>) -> Result<[T; 2]> {
    if pair % 2 == 1 {
        Ok([start(0)?, start(1)?])
    } else {
        let second = start(1)?;
        Ok([start(0)?, second])
    }
}

/// Whose slice it is, `each` of both. Who has the first changes every two pairs: so who started first has it as often as
/// the other one.
pub fn slices(pair: u32, each: u32) -> impl Iterator<Item = usize> {
    (0..each * 2).map(move |i| (i.div_ceil(2) + pair / 2) as usize % 2)
}

/// "mean 0.9951, standard error 0.0012" of ratios: how far the pairs agree.
pub fn mean_and_error(ratios: impl Iterator<Item = f64>) -> String {
    let logs: Vec<f64> = ratios.map(f64::ln).filter(|l| l.is_finite()).collect();
    let n = logs.len() as f64;
    if n < 2.0 {
        return "one pair tells no error".into();
    }
    let mean = logs.iter().sum::<f64>() / n;
    let variance = logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / (n - 1.0);
    format!("mean {:.4}, standard error {:.4}", mean.exp(), (variance / n).sqrt() * mean.exp())
}

/// Whether the median holds against `at_least`, and a sentence that says so.
pub fn verdict(ratios: &[f64], at_least: f64) -> (bool, String) {
    let holds = measure::spread(ratios.iter().copied()).is_some_and(|s| s.0 >= at_least);
    let word = if holds { "holds" } else { "FALLS SHORT" };
    let spread = mean_and_error(ratios.iter().copied());
    (holds, format!("The median throughput ratio must be at least {at_least}: {word} ({spread})."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_first_in_turn() {
        for (pair, order) in [(1, [0, 1]), (2, [1, 0]), (3, [0, 1])] {
            let started = std::cell::RefCell::new(vec![]);
            let both = start_both(pair, |which| {
                started.borrow_mut().push(which);
                Ok(which)
            });
            assert_eq!((both.unwrap(), started.into_inner()), ([0, 1], order.to_vec()));
        }
        assert!(start_both(2, |_| -> Result<()> { anyhow::bail!("no") }).is_err());
    }

    #[test]
    fn slices_are_fair() {
        assert_eq!(slices(1, 4).collect::<Vec<_>>(), [0, 1, 1, 0, 0, 1, 1, 0]);
        assert_eq!(slices(2, 2).collect::<Vec<_>>(), [1, 0, 0, 1]);
        for pair in 1..9 {
            for each in 1..9 {
                assert_eq!(slices(pair, each).filter(|which| *which == 0).count() as u32, each);
            }
        }
        let first = |pair| (pair % 2, slices(pair, 1).next().unwrap());
        assert_eq!([1, 2, 3, 4].map(first), [(1, 0), (0, 1), (1, 1), (0, 0)]);
    }

    #[test]
    fn ratios_are_summed_up() {
        assert_eq!(mean_and_error([0.5, 2.0].into_iter()), "mean 1.0000, standard error 0.6931");
        assert_eq!(mean_and_error([0.5, f64::NAN].into_iter()), "one pair tells no error");
        assert!(verdict(&[0.9, 0.997, 1.0], 0.996).0 && !verdict(&[0.9, 0.995, 1.0], 0.996).0 && !verdict(&[], 0.9).0);
    }
}
