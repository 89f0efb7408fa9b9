//! A Python HTTP server that refuses an upload.
