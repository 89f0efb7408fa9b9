//! What a lane allocates. This program holds one test: the allocator counts for all threads.

#[cfg(test)]
mod packet_path;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;
