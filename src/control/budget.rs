//! How many cancels the controller may still spend: a token bucket, and a share of the completions.
//!
//! Both must allow a cancel. A full stall completes nothing, so the share too starts with the whole burst and is
//! earned back by completions: `burst` cancels are possible at any time, more only while work gets done.

/// Plain numbers from the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetParams {
    /// Cancels per second that the bucket earns.
    pub rate_per_s: f64,
    /// Most cancels saved up; 0 = never cancel.
    pub burst: u32,
    /// Cancels earned per completed request (0.01 = at most 1% of them), beyond the burst.
    pub share: f64,
}

impl Default for BudgetParams {
    fn default() -> Self {
        BudgetParams { rate_per_s: 2.0, burst: 4, share: 0.01 }
    }
}

/// The buckets; time comes from the caller.
#[derive(Clone, Debug)]
pub struct Budget {
    params: BudgetParams,
    by_time: f64,
    by_share: f64,
    last_ns: Option<u64>,
}

impl Budget {
    /// Starts full.
    pub fn new(params: BudgetParams) -> Self {
        let full = params.burst as f64;
        Budget { params, by_time: full, by_share: full, last_ns: None }
    }

    /// New parameters; what is saved up stays, within the new burst.
    pub fn set_params(&mut self, params: BudgetParams) {
        self.params = params;
        self.by_time = self.by_time.min(params.burst as f64);
        self.by_share = self.by_share.min(params.burst as f64);
    }

    /// Earns: `now_ns` monotonic (a step back earns nothing), `completions` since the last call.
    pub fn refill(&mut self, now_ns: u64, completions: u64) {
        let passed_ns = now_ns.saturating_sub(self.last_ns.unwrap_or(now_ns));
        self.last_ns = Some(self.last_ns.map_or(now_ns, |last| last.max(now_ns)));
        let full = self.params.burst as f64;
        let earn = |had: f64, by: f64| if by > 0.0 { (had + by).min(full) } else { had };
        self.by_time = earn(self.by_time, passed_ns as f64 / 1e9 * self.params.rate_per_s);
        self.by_share = earn(self.by_share, completions as f64 * self.params.share);
    }

    /// Whole cancels that may be spent now.
    pub fn left(&self) -> usize {
        // The hair makes 10 x 0.1 a whole token.
        (self.by_time.min(self.by_share) + 1e-9).max(0.0) as usize
    }

    /// One that was spent has proven right: it is paid back, within the burst. Else a server with more culprits than the
    /// burst would have to live with the rest of them, though each of those cancels helped.
    pub fn pay_back(&mut self) {
        let full = self.params.burst as f64;
        self.by_time = (self.by_time + 1.0).min(full);
        self.by_share = (self.by_share + 1.0).min(full);
    }

    /// Spends `n`, at most what is left; returns how many were granted.
    pub fn take(&mut self, n: usize) -> usize {
        let n = n.min(self.left());
        self.by_time -= n as f64;
        self.by_share -= n as f64;
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn what_has_helped_is_paid_back_within_the_burst() {
        let mut b = Budget::new(BudgetParams { rate_per_s: 2.0, burst: 2, share: 0.0 });
        assert_eq!(b.take(2), 2);
        b.pay_back();
        assert_eq!((b.left(), b.take(2)), (1, 1));
        (0..5).for_each(|_| b.pay_back());
        assert_eq!(b.left(), 2);
    }

    #[test]
    fn a_burst_then_the_rate() {
        let mut b = Budget::new(BudgetParams { rate_per_s: 2.0, burst: 4, share: 1.0 });
        b.refill(10 * S, 0);
        assert_eq!(b.take(10), 4);
        assert_eq!(b.left(), 0);
        b.refill(11 * S, 1000);
        assert_eq!(b.left(), 2);
        b.refill(100 * S, 1000);
        assert_eq!(b.left(), 4, "never more than the burst");
    }

    #[test]
    fn beyond_the_burst_only_a_share_of_the_completions() {
        let mut b = Budget::new(BudgetParams { rate_per_s: 100.0, burst: 3, share: 0.01 });
        b.refill(S, 0);
        assert_eq!(b.take(3), 3);
        b.refill(50 * S, 99);
        assert_eq!(b.left(), 0, "time alone does not allow more");
        b.refill(51 * S, 101);
        assert_eq!(b.left(), 2);
    }

    #[test]
    fn steps_back_in_time_and_odd_numbers_earn_nothing() {
        let mut b = Budget::new(BudgetParams { rate_per_s: f64::NAN, burst: 1, share: -1.0 });
        b.refill(u64::MAX, 0);
        assert_eq!(b.take(1), 1);
        b.refill(0, u64::MAX);
        b.refill(u64::MAX, u64::MAX);
        assert_eq!(b.left(), 0);
        b.set_params(BudgetParams { rate_per_s: 1.0, burst: 0, share: 1.0 });
        b.refill(u64::MAX, u64::MAX);
        assert_eq!(b.left(), 0, "burst 0 never cancels");
    }
}
