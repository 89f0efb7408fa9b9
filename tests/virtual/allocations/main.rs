//! What strangers make an agent allocate. This program holds one test: the allocator counts for all threads.

#[cfg(test)]
mod script;
#[cfg(test)]
mod strangers;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;
