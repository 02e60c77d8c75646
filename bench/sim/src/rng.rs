//! Random numbers that are the same on every machine and in every version: xoshiro256++ seeded by splitmix64
//! (Blackman and Vigna). Copying one copies its future, which the counterfactuals need.

#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        let mut x = seed;
        Rng(std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Evenly in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Evenly in low..high.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Evenly in low..high on a logarithmic scale; both > 0.
    pub fn log_between(&mut self, low: f64, high: f64) -> f64 {
        (self.between(low.ln(), high.ln())).exp()
    }

    /// Evenly among the whole numbers low..=high.
    pub fn whole(&mut self, low: u64, high: u64) -> u64 {
        whole(low, high, self.unit())
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        exponential(mean, self.unit())
    }
}

// What even numbers in 0..1 make: whoever may not need it throws them and waits with the rest.

/// Evenly among the whole numbers low..=high.
pub fn whole(low: u64, high: u64, unit: f64) -> u64 {
    low + (unit * (high - low + 1) as f64) as u64
}

/// Exponential with this mean.
pub fn exponential(mean: f64, unit: f64) -> f64 {
    -mean * (1.0 - unit).ln()
}

/// Log-normal with this mean; `sigma` is the deviation of its logarithm (0 = constant).
pub fn log_normal(mean: f64, sigma: f64, units: (f64, f64)) -> f64 {
    // Box and Muller's transform; the second number of the pair is not needed.
    let normal = (-2.0 * (1.0 - units.0).ln()).sqrt() * (std::f64::consts::TAU * units.1).cos();
    mean * (sigma * normal - sigma * sigma / 2.0).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_right_and_copies_go_on_alike() {
        let mut r = Rng::new(7);
        let n = 200_000;
        let exponential: f64 = (0..n).map(|_| r.exponential(3.0)).sum::<f64>() / n as f64;
        let log_normal: f64 = (0..n).map(|_| log_normal(3.0, 0.8, (r.unit(), r.unit()))).sum::<f64>() / n as f64;
        assert!((exponential - 3.0).abs() < 0.05 && (log_normal - 3.0).abs() < 0.08, "{exponential} {log_normal}");
        let mut copy = r.clone();
        assert_eq!((0..9).map(|_| r.next()).collect::<Vec<_>>(), (0..9).map(|_| copy.next()).collect::<Vec<_>>());
        assert!((0..1000).map(|_| r.whole(2, 4)).all(|n| (2..=4).contains(&n)));
    }
}
