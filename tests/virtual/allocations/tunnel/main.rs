//! What IP packets make an agent allocate. This program holds one test: the allocator counts for all threads.

#[cfg(test)]
mod cable;
#[cfg(test)]
mod steady;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;
