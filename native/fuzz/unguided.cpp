// Stubs of the guided library's calls, for programs that no fuzzer drives.
extern "C" void __sanitizer_cov_trace_pc() {}
