//! What IP packets make an agent allocate. This program holds one test: the allocator counts for all threads.

#[cfg(test)]
mod steady;
#[cfg(test)]
mod wire;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;
