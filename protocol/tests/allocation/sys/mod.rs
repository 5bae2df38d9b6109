//! An allocator that remembers the largest single request of the current thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // `const` and without a destructor: reading it never allocates, so the allocator may use it.
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Remembering;

// SAFETY: every call is handed to `System` unchanged, which keeps the contract of `GlobalAlloc`; noting the size
// neither allocates nor unwinds.
unsafe impl GlobalAlloc for Remembering {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's promise for `layout` is passed on as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System` with this `layout`, because `alloc` and `realloc` ask nobody else.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(size));
        // SAFETY: as in `dealloc`; the caller promises that `size` is a valid one for the layout's alignment.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Remembering = Remembering;

/// Largest single allocation, in bytes, that `work` asks for on this thread.
pub(crate) fn largest_allocation<T>(work: impl FnOnce() -> T) -> (T, usize) {
    LARGEST.set(0);
    let value = work();
    (value, LARGEST.get())
}
