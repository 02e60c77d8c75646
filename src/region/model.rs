//! A region of loom's atomics: in ordinary memory, since they are more than their bits and nobody can map them.

use super::layout::*;
use super::Region;
use std::alloc::{alloc, dealloc, Layout};

impl Region {
    /// As `anonymous`, for one run of a model. Generations and times are the same in every run, for loom repeats runs.
    pub fn model(max_tasks: u32, max_workers: u32) -> Region {
        let bytes = region_bytes(max_tasks, max_workers);
        // SAFETY: the size is not 0; each part is written before anybody sees the region, at the place where `header`,
        // `tasks` and `workers` look for it.
        unsafe {
            let base = alloc(memory(bytes));
            assert!(!base.is_null());
            base.cast::<Header>().write(Header::default());
            let first_task = base.add(std::mem::size_of::<Header>()).cast::<TaskSlot>();
            (0..max_tasks as usize).for_each(|i| first_task.add(i).write(TaskSlot::default()));
            let first_worker = base.add(region_bytes(max_tasks, 0)).cast::<WorkerSlot>();
            (0..max_workers as usize).for_each(|i| first_worker.add(i).write(WorkerSlot::default()));
            Region { base, bytes, max_tasks, max_workers, path: None }
        }
    }
}

fn memory(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).expect("64 is a power of two")
}

impl Drop for Region {
    fn drop(&mut self) {
        let base = self.base.cast_mut();
        // SAFETY: made by `model`, and nobody borrows from it any more.
        unsafe {
            std::ptr::drop_in_place(base.cast::<Header>());
            std::ptr::drop_in_place(self.tasks() as *const [TaskSlot] as *mut [TaskSlot]);
            std::ptr::drop_in_place(self.workers() as *const [WorkerSlot] as *mut [WorkerSlot]);
            dealloc(base, memory(self.bytes));
        }
    }
}
