//! What the calling thread is bound to, found in a few instructions.
//!
//! A thread-local of Rust's in a shared library is asked of the loader (`__tls_get_addr`). In a library that the host loads
//! at run time, as every server with a module does, the loader makes room for it at each thread's first access: an
//! allocation inside a hot call. A TLS descriptor stands for room that the loader set aside when it loaded the library, a
//! fixed distance from the thread pointer; only where none is left the first access makes some, as before. On AArch64
//! descriptors are the rule; on x86-64 rustc cannot be asked for them, so the access is spelt out.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use crate::region::layout::{Header, Owner, TaskSlot, Trace};
use std::cell::Cell;

/// No destructor: a library that hosts may dlclose must not leave one behind. All zero is its first state.
#[repr(C, align(64))]
pub struct Bound {
    pub task: Cell<u64>,
    /// The state word under which the binding is valid.
    pub word: Cell<u64>,
    pub slot: Cell<*const TaskSlot>,
    pub trace: Cell<*const Trace>,
    pub header: Cell<*const Header>,
    /// The slot that names this thread as its worker.
    pub owner: Cell<*const Owner>,
    /// The kernel's number of this thread; 0 = not asked yet.
    pub tid: Cell<u32>,
    /// The task this thread ended last: its slot is taken again if it still is free.
    pub cached: Cell<u64>,
}

pub use here::BOUND;

#[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu", not(miri)))]
mod here {
    use super::Bound;
    use core::arch::{asm, global_asm};
    use core::mem::{align_of, size_of};

    const _: () = assert!(size_of::<Bound>() == 64 && align_of::<Bound>() == 64, "as reserved below");

    global_asm!(
        ".pushsection .tbss.atropos_bound, \"awT\", @nobits",
        ".p2align 6",
        ".hidden atropos_bound",
        ".globl atropos_bound",
        ".type atropos_bound, @object",
        ".size atropos_bound, 64",
        "atropos_bound:",
        ".zero 64",
        ".popsection",
    );

    pub struct Here;
    pub static BOUND: Here = Here;

    impl Here {
        #[inline(always)]
        pub fn with<R>(&self, f: impl FnOnce(&Bound) -> R) -> R {
            let at: *const Bound;
            // SAFETY: the sequence that the ABI lays down for a descriptor (linkers recognise it, and make two plain
            // instructions of it in a program). The function behind it changes rax alone, but where it has to make room
            // glibc before 2.40 forgot the vector registers.
            unsafe {
                asm!(
                    "lea rax, [rip + atropos_bound@TLSDESC]",
                    "call qword ptr [rax + atropos_bound@TLSCALL]",
                    "add rax, qword ptr fs:[0]",
                    out("rax") at,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(pure, nomem),
                );
            }
            // SAFETY: the thread's own zeroed storage, which lives as long as the thread; `Bound` is all cells.
            f(unsafe { &*at })
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu", not(miri))))]
mod here {
    use super::Bound;
    use std::cell::Cell;
    use std::ptr::null;

    thread_local! {
        pub static BOUND: Bound = const {
            Bound {
                task: Cell::new(0),
                word: Cell::new(0),
                slot: Cell::new(null()),
                trace: Cell::new(null()),
                header: Cell::new(null()),
                owner: Cell::new(null()),
                tid: Cell::new(0),
                cached: Cell::new(0),
            }
        };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_own_and_begins_unbound() {
        let read = || BOUND.with(|b| (b.task.get(), b.word.get(), b.slot.get().is_null(), b.cached.get()));
        assert_eq!(std::thread::spawn(read).join().unwrap(), (0, 0, true, 0));
        let mine = std::thread::spawn(move || {
            BOUND.with(|b| b.task.set(7));
            assert_eq!(std::thread::spawn(read).join().unwrap().0, 0);
            read()
        });
        assert_eq!(mine.join().unwrap().0, 7);
        assert_eq!(BOUND.with(|b| b as *const Bound as usize) % 64, 0);
    }
}
