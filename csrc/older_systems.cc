// What lets a library that was compiled on a new system load on an older one (manylinux_2_24: glibc 2.24, GCC 6).
//
// libstdc++ has had this function since GCC 11, and its containers call it where a size overflows. Ours takes its place
// within the library (csrc/exports.map hides it); it throws the same.
#include <new>

#if defined(__GLIBCXX__) && defined(__linux__)
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
